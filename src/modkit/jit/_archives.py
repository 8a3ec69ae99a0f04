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

import torch

from modkit.errors import shown
from modkit.files.atomic_write import atomic_write
from modkit.files.torchscript_files import Parts, VerifiedArchive
from modkit.jit._from_torch import make_parameters
from modkit.jit._upstream import (
    CompilationUnit,
    import_module,
    import_module_from_buffer,
    import_module_from_package,
    package_reader,
    storage_context,
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
    found = ((path, part._non_persistent_buffers_set) for path, part in module.named_modules())
    transient = {path: sorted(names) for path, names in found if names}
    if transient:
        files[RECORD] = json.dumps({"version": 1, "non_persistent_buffers": transient})
    return files


def save(module: Any, target: Any, files: ExtraFiles | None) -> None:
    """Write a ScriptModule of modkit to an open file or a path."""
    save_compiled(module._c, target, with_record(module, files))


def save_compiled(compiled: Any, target: Any, files: ExtraFiles) -> None:
    """Write an object that C++ serializes to an open file, or atomically to a path."""
    is_path = isinstance(target, (str, os.PathLike))
    path = Path(cast("os.PathLike[str]", target)).absolute() if is_path else None
    if path is not None and not path.parent.is_dir():
        raise RuntimeError(f"Parent directory {path.parent} does not exist.")

    # C++ ends the process if it cannot write to a disk, so it only writes to memory.
    content: bytes = compiled.save_to_buffer(_extra_files=files)
    if path is None:
        target.write(content)
        return
    with atomic_write(path) as unfinished:
        unfinished.write_bytes(content)


def read(
    archive: VerifiedArchive, map_location: Any, files: Iterable[str], restore_shapes: bool
) -> tuple[Any, dict[str, bytes]]:
    """Return the C++ module in an archive, and the contents of extra files."""
    if import_module is None:
        raise RuntimeError("this release of torch reads no TorchScript")
    source, present, parts = archive
    found: dict[str, Any] = dict.fromkeys((*files, RECORD), "")
    load = import_module_from_buffer if isinstance(source, bytes) else import_module
    try:
        if parts is not None:
            extra = {
                name: parts.read(f"extra/{name}") if name in (present or ()) else b""
                for name in found
            }
            return _of_parts(parts, map_location), extra
        cpp = load(CompilationUnit(), source, map_location, found, restore_shapes)
    except UnicodeDecodeError as error:
        # The message of C++ contains bytes of the file.
        text = bytes(error.object).decode("utf-8", "replace")
        raise RuntimeError(shown(f"torch cannot load the archive: {text}")) from error
    return cpp, found


def _of_parts(parts: Parts, map_location: Any) -> Any:
    """Return the C++ module of content that has been read, with the tensors in their memory."""
    context = storage_context()
    for key, storage in parts.storages.items():
        context.add_storage(key, torch.empty(0, dtype=torch.uint8).set_(storage))
    reader = package_reader(parts.package)
    return import_module_from_package(CompilationUnit(), reader, context, map_location, "0")


def finish(module: Any, note: bytes | str) -> Any:
    """Make Parameters of loaded tensors, and mark the buffers that ``modkit.json`` lists."""
    make_parameters(module)
    try:
        transient = json.loads(note)["non_persistent_buffers"].items()
    except (ValueError, TypeError, LookupError, AttributeError):
        # The archive has none, or a file of that name that modkit did not write.
        transient = ()
    for path, names in transient:
        with contextlib.suppress(AttributeError, TypeError):
            part = module.get_submodule(path)
            part._non_persistent_buffers_set.update(n for n in names if n in part._buffers)
    return module
