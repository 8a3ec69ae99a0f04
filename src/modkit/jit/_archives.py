"""Write a ScriptModule to an archive and read it, in torch's format.

The compiler does not know which buffers are persistent, so the extra file ``modkit.json`` lists those
that are not. Torch and C++ ignore that file.
"""

import contextlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, cast

import torch

from modkit.files.atomic_write import atomic_write, reserve
from modkit.jit._from_torch import make_parameters
from modkit.jit._upstream import CompilationUnit, import_module, import_module_from_buffer


RECORD: Final = "modkit.json"
_VERSION: Final = 1
ExtraFiles = Mapping[str, str | bytes]


def _record(module: Any) -> dict[str, str]:
    """Return the extra file that is needed for this module, if any."""
    transient = {
        path: sorted(part._non_persistent_buffers_set)
        for path, part in module.named_modules()
        if part._non_persistent_buffers_set
    }
    if not transient:
        return {}
    return {RECORD: json.dumps({"version": _VERSION, "non_persistent_buffers": transient})}


def _extra_files(module: Any, given: ExtraFiles | None) -> dict[str, str | bytes]:
    files = dict(given or {})
    for name, content in files.items():
        if not isinstance(cast("object", content), (str, bytes)):
            raise TypeError(
                f"the extra file {name!r} has to be str or bytes, not {type(content).__name__}"
            )
    # It may be among files that were read from another archive.
    files.pop(RECORD, None)
    return {**files, **_record(module)}


def to_bytes(module: Any, files: ExtraFiles | None) -> bytes:
    """Return the archive."""
    return cast("bytes", module._c.save_to_buffer(_extra_files=_extra_files(module, files)))


def save(module: Any, target: Any, files: ExtraFiles | None) -> None:
    """Write the archive to a path or an open file."""
    tensors = [*module.parameters(), *module.buffers()]
    storages = [each.untyped_storage() for each in tensors if each.layout == torch.strided]
    size = sum({each.data_ptr(): each.nbytes() for each in storages}.values())
    save_compiled(module._c, target, _extra_files(module, files), size)


def save_compiled(compiled_module: Any, target: Any, files: ExtraFiles, size: int = 0) -> None:
    """Write the archive of a module, or a function, of C++.

    Args:
        compiled_module: The module or function.
        target: Path or open file.
        files: The extra files.
        size: Bytes in the tensors: on a full disk the writer of C++ would abort the process.

    Raises:
        OSError: The file cannot be written.
        RuntimeError: The folder does not exist.
    """
    if not isinstance(target, (str, os.PathLike)):
        target.write(compiled_module.save_to_buffer(_extra_files=files))
        return
    path = Path(cast("os.PathLike[str]", target)).absolute()
    if not path.parent.is_dir():
        raise RuntimeError(f"Parent directory {path.parent} does not exist.")
    with atomic_write(path) as unfinished:
        reserve(unfinished, size)
        try:
            os.fspath(unfinished).encode()
        except UnicodeEncodeError:  # C++ takes no such path
            unfinished.write_bytes(compiled_module.save_to_buffer(_extra_files=files))
        else:
            compiled_module.save(str(unfinished), _extra_files=files)


def read(
    source: str | bytes,
    map_location: torch.device | None = None,
    files: Iterable[str] = (),
    restore_shapes: bool = False,
) -> tuple[Any, dict[str, bytes]]:
    """Return the C++ module in an archive, and the content of extra files.

    Args:
        source: Path or content of the archive.
        map_location: Device to put the tensors on.
        files: Names of extra files to read, beside that of modkit.
        restore_shapes: Run the module with the inputs that it was traced with.

    Raises:
        RuntimeError: Torch cannot load it, or loads no TorchScript at all.
    """
    if import_module is None:
        raise RuntimeError("this release of torch reads no TorchScript")
    found: dict[str, Any] = dict.fromkeys((*files, RECORD), "")
    load = import_module_from_buffer if isinstance(source, bytes) else import_module
    try:
        cpp = load(CompilationUnit(), source, map_location, found, restore_shapes)
    except UnicodeDecodeError as error:
        # The message of C++ has bytes of the file in it.
        text = bytes(error.object).decode("utf-8", "replace")
        raise RuntimeError(f"torch cannot load the archive: {text}") from error
    return cpp, found


def finish(module: Any, note: bytes | str) -> Any:
    """Make Parameters of loaded tensors, and mark the buffers that ``modkit.json`` lists."""
    make_parameters(module)
    transient = json.loads(note).get("non_persistent_buffers", {}) if note else {}
    for path, names in transient.items():
        with contextlib.suppress(AttributeError):
            part = module.get_submodule(path)
            part._non_persistent_buffers_set.update(n for n in names if n in part._buffers)
    return module
