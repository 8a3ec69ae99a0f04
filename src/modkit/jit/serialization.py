"""``save`` and ``load``: archives that torch, C++ and modkit read alike."""

import functools
import os
from collections.abc import Mapping, MutableMapping
from typing import Any, cast

import torch

from modkit.jit import _archive_io
from modkit.jit._notice import give_notice
from modkit.jit._upstream import validate_map_location
from modkit.jit._wrap import wrap_cpp
from modkit.jit.script_module import ScriptModule


def save(m: Any, f: Any, _extra_files: Mapping[str, str | bytes] | None = None) -> None:
    """Write a ScriptModule or a ScriptFunction, with its code, to an archive.

    Args:
        m: What to save.
        f: A path, which holds either what it held before or the whole archive, or a file that is
            open for writing.
        _extra_files: Further files for the archive: name to content.

    Raises:
        TypeError: ``m`` is not compiled.
        RuntimeError: a method that is not compiled is called by one that is.

    Example:
        >>> import io
        >>> import modkit.nn as nn
        >>> from modkit import jit
        >>> buffer = io.BytesIO()
        >>> jit.save(jit.script(nn.Linear(4, 2)), buffer, _extra_files={"labels.txt": "cat,dog"})
        >>> labels = {"labels.txt": b""}
        >>> _ = jit.load(io.BytesIO(buffer.getvalue()), _extra_files=labels)
        >>> labels
        {'labels.txt': b'cat,dog'}

    Differs from torch: a file is replaced as a whole, and buffers that are not persistent stay so.
    """
    give_notice()
    if isinstance(m, ScriptModule):
        m.save(f, _extra_files)
        return
    if not isinstance(m, (torch.jit.ScriptModule, torch.jit.ScriptFunction)):
        raise TypeError(
            f"modkit.jit.save takes a ScriptModule or a ScriptFunction, not a {torch.typename(m)}; "
            "modkit.jit.script and trace compile one"
        )
    files = dict(_extra_files or {})
    compiled: Any = m
    if isinstance(f, (str, os.PathLike)):
        path = cast("os.PathLike[str]", f)
        _archive_io.write_whole(path, functools.partial(compiled.save, _extra_files=files))
    else:
        f.write(compiled.save_to_buffer(_extra_files=files))


def _usable(map_location: torch.device | str | None) -> torch.device | None:
    """Return the device, or raise if tensors cannot be there; nothing has been read by then."""
    device: torch.device | None = validate_map_location(map_location)
    if device is not None:
        try:
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError, ImportError) as error:
            reason = str(error).partition("\n")[0]
            raise RuntimeError(
                f"modkit.jit.load cannot use map_location={str(device)!r} here: {reason}"
            ) from error
    return device


def load(
    f: Any,
    map_location: torch.device | str | None = None,
    _extra_files: MutableMapping[str, Any] | None = None,
    _restore_shapes: bool = False,
) -> ScriptModule:
    """Read an archive that ``save``, torch or C++ has written.

    Loading runs code that is in the archive, so load only what you trust.

    Args:
        f: A path, or a file that is open for reading.
        map_location: Where the tensors go; by default where they were when they were saved.
        _extra_files: The names of the extra files to read; their content, as bytes, is filled in.
        _restore_shapes: Run the module with the inputs that it was traced with.

    Raises:
        ValueError: there is no such file, or ``map_location`` is no device.
        KeyError: the archive has no extra file of that name.
        RuntimeError: it is no archive of TorchScript, or the device is not there.

    Differs from torch: parameters are of type ``Parameter``, and a module that stands in several
    places is one. A missing extra file is an error.
    """
    give_notice()
    source: str | bytes
    if isinstance(f, (str, os.PathLike)):
        source = os.fspath(f)
        if not os.path.exists(source):  # noqa: PTH110 - a path may be bytes too
            raise ValueError(f"The provided filename {f} does not exist")
        if os.path.isdir(source):  # noqa: PTH112
            raise ValueError(f"The provided filename {f} is a directory")
    else:
        source = f.read()
    device = _usable(map_location)
    cpp, note = _archive_io.read(source, device, _extra_files, _restore_shapes)
    module: ScriptModule = _archive_io.finish(wrap_cpp(ScriptModule, cpp), note)
    return module
