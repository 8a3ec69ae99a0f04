"""Write a ScriptModule to an archive and read it, in torch's format.

The compiler does not know which buffers are persistent, so the extra file ``modkit.json`` lists
those that are not. Torch and C++ ignore that file.
"""

import contextlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, cast

from modkit.errors import shown
from modkit.files.atomic_write import atomic_write
from modkit.files.torchscript_files import VerifiedArchive
from modkit.jit._from_torch import make_parameters
from modkit.jit._upstream import (
    CompilationUnit,
    import_module,
    import_module_from_buffer,
)


RECORD: Final = "modkit.json"
ExtraFiles = Mapping[str, str | bytes]


def with_record(module: Any, given: ExtraFiles | None) -> dict[str, str | bytes]:
    """Return the given extra files, and that of modkit if the module needs it."""
    files = dict(given or {})
    for name, content in files.items():
        if not isinstance(cast("object", content), (str, bytes, bytearray)):
            kind = type(content).__name__
            raise TypeError(f"the extra file {name!r} must be str or bytes, not {kind}")

    # It may be among files that were read from another archive.
    files.pop(RECORD, None)
    transient = {
        path: sorted(submodule._non_persistent_buffers_set)
        for path, submodule in module.named_modules()
        if submodule._non_persistent_buffers_set
    }
    if transient:
        files[RECORD] = json.dumps({"version": 1, "non_persistent_buffers": transient})
    return files


def save(module: Any, target: Any, files: ExtraFiles | None) -> None:
    """Write a ScriptModule of modkit."""
    save_compiled(module._c, target, with_record(module, files))


def save_compiled(compiled: Any, target: Any, files: ExtraFiles) -> None:
    """Write an object that C++ serializes to an open file, or atomically to a path."""
    # C++ ends the process if it cannot write to a disk, so it only writes to memory.
    content: bytes = compiled.save_to_buffer(_extra_files=files)
    if not isinstance(target, (str, os.PathLike)):
        target.write(content)
        return
    path = Path(target).absolute()
    try:
        with atomic_write(path) as unfinished:
            unfinished.write_bytes(content)
    except (FileNotFoundError, NotADirectoryError) as error:
        # In torch's words.
        raise RuntimeError(f"Parent directory {path.parent} does not exist.") from error


def read(
    archive: VerifiedArchive, map_location: Any, files: Iterable[str], restore_shapes: bool
) -> tuple[Any, dict[str, bytes]]:
    """Read the C++ module in an archive, and the contents of extra files."""
    if import_module is None:
        raise RuntimeError("this release of torch reads no TorchScript")

    source = archive.source
    # C++ fills the values in.
    contents: dict[str, Any] = dict.fromkeys((*files, RECORD))
    load = import_module_from_buffer if isinstance(source, bytes) else import_module
    try:
        cpp = load(CompilationUnit(), source, map_location, contents, restore_shapes)
    except UnicodeDecodeError as error:
        # The message of C++ contains bytes of the file.
        message = bytes(error.object).decode(errors="replace")
        raise RuntimeError(shown(f"torch cannot load the archive: {message}")) from error
    return cpp, contents


def finish(module: Any, note: bytes | str) -> Any:
    """Make Parameters of loaded tensors, and mark the buffers that ``modkit.json`` lists."""
    make_parameters(module)
    try:
        transient = json.loads(note)["non_persistent_buffers"].items()
    except (ValueError, TypeError, LookupError, AttributeError):
        # The archive has none, or a file of that name that modkit did not write.
        transient = ()

    for path, names in transient:
        # Another program may have changed the file, or the module; what is left still loads.
        with contextlib.suppress(AttributeError, TypeError):
            submodule = module.get_submodule(path)
            submodule._non_persistent_buffers_set.update(
                name for name in names if name in submodule._buffers
            )
    return module
