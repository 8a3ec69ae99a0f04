"""``save`` and ``load``: archives that torch, C++ and modkit read alike."""

import os
import warnings
from collections.abc import Mapping, MutableMapping
from typing import Any, cast

import torch

from modkit.jit import _archive_io
from modkit.jit._archive import check_archive
from modkit.jit._export import EXPORT, export_files, load_export, to_export
from modkit.jit._map_location import checked_map_location
from modkit.jit._notice import give_notice
from modkit.jit._wrap import wrap_cpp
from modkit.jit.script_module import ScriptModule


def save(
    m: Any,
    f: Any,
    _extra_files: Mapping[str, str | bytes] | None = None,
    *,
    export_args: tuple[Any, ...] | None = None,
) -> None:
    """Write a ScriptModule or a ScriptFunction, with its code, to an archive.

    A program of ``torch.export`` in the same file can be read when TorchScript is gone. It has weights
    of its own, so the file grows by that.

    Args:
        m: What to save.
        f: A path, which holds either what it held before or the whole archive, or a file that is
            open for writing.
        _extra_files: Further files for the archive: name to content.
        export_args: Inputs to convert the module with, as ``to_export`` takes them; the program goes
            into the archive as the extra file ``export.pt2``.

    Raises:
        TypeError: ``m`` is not compiled.
        RuntimeError: a method that is not compiled is called by one that is.
        ConversionError: ``m`` cannot be converted. Nothing has been written by then.

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

    Differs from torch: a file is replaced as a whole, and buffers that are not persistent stay so. The
    archive lists its members, so that ``load`` finds those that were exchanged.
    """
    give_notice()
    if not isinstance(m, (torch.jit.ScriptModule, torch.jit.ScriptFunction)):
        raise TypeError(
            f"modkit.jit.save takes a ScriptModule or a ScriptFunction, not a {torch.typename(m)}; "
            "modkit.jit.script and trace compile one"
        )
    files = dict(_extra_files or {})
    if export_args is not None:
        if EXPORT in files:
            raise ValueError(f"_extra_files has {EXPORT!r}, where export_args puts the program")
        files |= export_files(to_export(m, export_args))
    if isinstance(m, ScriptModule):
        m.save(f, files)
    else:
        _archive_io.save_compiled(m, f, files)


def _source(f: Any, in_memory: bool) -> str | bytes:
    """Return the path, or the content of an open file; of a path too if it has to stay the same."""
    if isinstance(f, (str, os.PathLike)):
        path = os.fsdecode(cast("os.PathLike[str]", f))
        if not os.path.exists(path):  # noqa: PTH110 - the texts show the path as it was given
            raise ValueError(f"The provided filename {f} does not exist")
        if os.path.isdir(path):  # noqa: PTH112
            raise ValueError(f"The provided filename {f} is a directory")
        if not in_memory:
            return path
        with open(path, "rb") as file:  # noqa: PTH123
            return file.read()
    content: bytes = f.read()
    if not content and hasattr(f, "seekable") and f.seekable() and f.tell():
        # It has just been written, and stands at its end.
        f.seek(0)
        content = f.read()
    return content


def load(
    f: Any,
    map_location: torch.device | str | None = None,
    _extra_files: MutableMapping[str, Any] | None = None,
    _restore_shapes: bool = False,
    *,
    sha256: str | None = None,
) -> ScriptModule:
    """Read an archive that ``save``, torch or C++ has written.

    The file is checked before anything of it is loaded, as by ``check_archive``. Loading runs code that
    is in the archive, so load only what you trust; ``sha256`` makes sure that it is that.

    Where torch cannot load TorchScript any more and the archive has a program of ``torch.export``, that
    is what is returned, with a warning: a plain module for inference, which computes what the saved one
    did in the mode that it had.

    Args:
        f: A path, or a file that is open for reading.
        map_location: Where the tensors go; by default where they were when they were saved.
        _extra_files: The names of the extra files to read; their content, as bytes, is filled in.
        _restore_shapes: Run the module with the inputs that it was traced with.
        sha256: The digest that the file has to have, as ``sha256sum`` prints it. The file is then read
            into memory first, so that what is compared is what is loaded.

    Raises:
        ValueError: there is no such file, it has another digest, or ``map_location`` is no device.
        KeyError: the archive has no extra file of that name.
        FileError: it is damaged or no archive of TorchScript; the text says what it is, and what
            reads it.
        RuntimeError: the device is not there, or torch cannot load the archive.

    Example:
        >>> import io
        >>> import modkit.nn as nn
        >>> from modkit import jit
        >>> buffer = io.BytesIO()
        >>> jit.save(jit.script(nn.Linear(4, 2)), buffer)
        >>> digest = jit.inspect(buffer).sha256
        >>> jit.load(buffer, sha256=digest).weight.shape
        torch.Size([2, 4])

    Differs from torch: parameters are of type ``Parameter``, and a module that stands in several
    places is one. Damage, and a missing extra file, is an error.
    """
    give_notice()
    device = checked_map_location(map_location)
    source = _source(f, sha256 is not None)
    found = check_archive(source, sha256, _extra_files or ())
    try:
        cpp, note = _archive_io.read(source, device, _extra_files, _restore_shapes)
    except Exception as error:
        if EXPORT not in found or not _archive_io.is_readable(source):
            raise
        module = load_export(source, device, _extra_files)
        reason = str(error).strip().partition("\n")[0]
        warnings.warn(
            f"torch cannot load the TorchScript of the archive ({reason}), so the program of "
            "torch.export beside it is loaded",
            UserWarning,
            stacklevel=2,
        )
        return cast("ScriptModule", module)
    loaded: ScriptModule = _archive_io.finish(wrap_cpp(ScriptModule, cpp), note)
    return loaded
