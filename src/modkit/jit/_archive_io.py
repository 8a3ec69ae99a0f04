"""Archives: what is written beside the code and the tensors, and how a file comes to be whole.

The compiler does not know which buffers are not persistent, so an extra file says it. Torch and
C++ read the same archive, and pass over that file.
"""

import contextlib
import io
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, MutableMapping
from pathlib import Path
from typing import Any, Final, cast

import torch

from modkit.jit._archive_seal import seal, sealed
from modkit.jit._class_based import ScriptMeta, base_class
from modkit.jit._members import bind, compiled, plain_state
from modkit.jit._upstream import (
    ArchiveReader,
    CompilationUnit,
    ModuleDict,
    import_module,
    import_module_from_buffer,
)
from modkit.jit._wrap import Memo, attach_compiled_hooks, blank, make_parameters
from modkit.nn._hooks import TABLES, reserve_ids


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
    data: bytes = compiled(module).save_to_buffer(_extra_files=_extra_files(module, files))
    return sealed(data)


def save(module: Any, target: Any, files: ExtraFiles | None) -> None:
    """Write the archive to a path or an open file."""
    save_compiled(compiled(module), target, _extra_files(module, files))


def save_compiled(compiled_module: Any, target: Any, files: ExtraFiles) -> None:
    """Write the archive of a module, or a function, of C++, with the list of its members."""

    def write(path: str) -> None:
        compiled_module.save(path, _extra_files=files)
        seal(path)

    if isinstance(target, (str, os.PathLike)):
        path = Path(cast("os.PathLike[str]", target))
        if not path.exists() or path.is_file():
            write_whole(path, write)
            return
        # A pipe or a device has no other way of being written to, and a folder refuses.
        with path.open("wb") as file:
            file.write(sealed(compiled_module.save_to_buffer(_extra_files=files)))
    else:
        target.write(sealed(compiled_module.save_to_buffer(_extra_files=files)))


def write_whole(target: Path, write: Callable[[str], Any]) -> None:
    """Let ``write`` make a file and put it at the path ``target`` in one step.

    It gets its name in a folder of its own beside ``path``, since an archive holds the name of the
    file that it was written to. What a link leads to is replaced, not the link.

    Raises:
        RuntimeError: the folder does not exist.
    """
    path = target.absolute()
    if not path.parent.is_dir():
        raise RuntimeError(f"Parent directory {path.parent} does not exist.")
    final = path.resolve()
    folder = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=final.parent))
    try:
        write(str(folder / path.name))
        with (folder / path.name).open("rb+") as file:
            os.fsync(file.fileno())
        (folder / path.name).replace(final)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def is_readable(source: str | bytes) -> bool:
    """Tell whether torch finds the members of an archive, whatever it makes of them."""
    try:
        ArchiveReader(io.BytesIO(source) if isinstance(source, bytes) else source)
    except (RuntimeError, UnicodeDecodeError):
        return False
    return True


def read(
    source: str | bytes,
    map_location: torch.device | None,
    files: MutableMapping[str, Any] | None,
    restore_shapes: bool = False,
) -> tuple[Any, dict[str, Any]]:
    """Return the C++ module in an archive, and what modkit has noted beside it.

    Args:
        source: A path, or the content of the archive.
        map_location: Where the tensors go.
        files: The extra files that are wanted, and are there; their content is filled in, as bytes.
        restore_shapes: Run the module with the inputs that it was traced with.

    Raises:
        RuntimeError: Torch cannot load it, or loads no TorchScript at all.
    """
    if import_module is None:
        raise RuntimeError("this release of torch reads no TorchScript")
    wanted = dict.fromkeys((*(files or ()), RECORD), "")
    load = import_module_from_buffer if isinstance(source, bytes) else import_module
    try:
        cpp = load(CompilationUnit(), source, map_location, wanted, restore_shapes)
    except UnicodeDecodeError as error:
        # The message of C++ has bytes of the file in it.
        text = bytes(error.object).decode("utf-8", "replace")
        raise RuntimeError(f"torch cannot load the archive: {text}") from error
    note = wanted[RECORD]
    if files is not None:
        files.update((name, wanted[name]) for name in tuple(files))
    return cpp, json.loads(note) if note else {}


def finish(module: Any, note: dict[str, Any]) -> Any:
    """Make parameters of what was read, and note which buffers are not persistent."""
    make_parameters(module)
    for path, names in note.get("non_persistent_buffers", {}).items():
        with contextlib.suppress(AttributeError):
            part = module.get_submodule(path)
            part._non_persistent_buffers_set.update(n for n in names if n in part._buffers)
    return module


def _pickled_state(module: Any) -> dict[str, Any]:
    """Return what stands in Python beside the archive; compiled hooks are in that."""
    state = plain_state(module)
    for name in TABLES:
        hooks = state[name].items()
        state[name] = type(state[name])(
            (key, hook) for key, hook in hooks if not isinstance(hook, torch.jit.ScriptFunction)
        )
    return state


def reduce(module: Any) -> str | tuple[Any, ...]:
    """Describe the module to pickle: the archive, and the class and state of each part."""
    if "_c" not in module.__dict__:
        return object.__reduce_ex__(module, 2)
    parts = {
        path: (type(part), _pickled_state(part))
        for path, part in module.named_modules()
        if isinstance(type(part), ScriptMeta)
    }
    return rebuild, (to_bytes(module, None), parts)


def rebuild(data: bytes, parts: dict[str, tuple[Any, dict[str, Any]]]) -> Any:
    """Make the module that ``reduce`` has described."""
    cpp, note = read(data, None, None)
    return finish(_rebuilt(cpp, "", parts, Memo()), note)


def _rebuilt(cpp: Any, path: str, parts: dict[str, tuple[Any, dict[str, Any]]], memo: Memo) -> Any:
    if cpp in memo.by_cpp:
        return memo.by_cpp[cpp]
    # A class-based child of torch has no part of its own.
    cls, state = parts.get(path) or (base_class(parts[""][0]), {})
    module = memo.by_cpp[cpp] = blank(cls)
    module.__dict__.update(state)
    reserve_ids(state)
    prefix = f"{path}." if path else ""
    below = ModuleDict(cpp).items()
    bind(module, cpp, {n: _rebuilt(child, prefix + n, parts, memo) for n, child in below})
    attach_compiled_hooks(module)
    return module
