"""``save`` and ``load``: archives that torch, C++ and modkit read alike."""

from collections.abc import Mapping, MutableMapping
from typing import Any

import torch

from modkit.files.torch_files import verified_archive
from modkit.jit import _archive_io
from modkit.jit._map_location import checked_map_location
from modkit.jit._notice import give_notice
from modkit.jit._wrap import wrap_cpp
from modkit.jit.script_module import ScriptModule


def save(m: Any, f: Any, _extra_files: Mapping[str, str | bytes] | None = None) -> None:
    """Write a ScriptModule or a ScriptFunction, with its code, to an archive.

    Args:
        m: A ScriptModule or a ScriptFunction.
        f: A path, which is written atomically, or a file that is open for writing.
        _extra_files: Further files for the archive: name to content.

    Raises:
        TypeError: ``m`` is not compiled.
        RuntimeError: The folder does not exist, or a method that is not compiled is called by one that
            is.

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

    Differs from torch: a file is replaced atomically, and buffers that are not persistent stay so.
    """
    give_notice()
    if not isinstance(m, (torch.jit.ScriptModule, torch.jit.ScriptFunction)):
        raise TypeError(
            f"modkit.jit.save takes a ScriptModule or a ScriptFunction, not a {torch.typename(m)}; "
            "modkit.jit.script and trace compile one"
        )
    if isinstance(m, ScriptModule):
        m.save(f, _extra_files)
    else:
        _archive_io.save_compiled(m, f, dict(_extra_files or {}))


def load(
    f: Any,
    map_location: torch.device | str | None = None,
    _extra_files: MutableMapping[str, Any] | None = None,
    _restore_shapes: bool = False,
    *,
    sha256: str | None = None,
) -> ScriptModule:
    """Read an archive that ``save``, torch or C++ has written, and verify its checksums.

    Loading runs code that is in the archive, so load only files that you trust. ``sha256`` makes sure
    that the file is the one that you know.

    Args:
        f: A path, or a file that is open for reading.
        map_location: Device to put the tensors on; by default the one that they were saved from.
        _extra_files: Names of extra files to read; their content is filled in as bytes.
        _restore_shapes: Run the module with the inputs that it was traced with.
        sha256: Expected digest of the file, as ``sha256sum`` prints it.

    Raises:
        ValueError: There is no such file, it has another digest, or ``map_location`` is not a device.
        KeyError: The archive has no extra file of that name.
        FileError: The file is corrupt or not a TorchScript archive. The text says what it is, and what
            reads it.
        RuntimeError: The device is not available, or torch cannot load the archive.

    Example:
        >>> import hashlib, io
        >>> import modkit.nn as nn
        >>> from modkit import jit
        >>> buffer = io.BytesIO()
        >>> jit.save(jit.script(nn.Linear(4, 2)), buffer)
        >>> digest = hashlib.sha256(buffer.getvalue()).hexdigest()
        >>> jit.load(buffer, sha256=digest).weight.shape
        torch.Size([2, 4])

    Differs from torch: parameters are of type ``Parameter``, and a module that stands in several
    places is one. A corrupt file, and a missing extra file, is an error.
    """
    give_notice()
    device = checked_map_location(map_location)
    wanted = tuple(_extra_files or ())
    with verified_archive(f, sha256) as archive:
        missing = [name for name in wanted if name not in archive.extra_files]
        if missing:
            names = ", ".join(map(repr, archive.extra_files))
            raise KeyError(
                f"the archive has no extra file {', '.join(map(repr, missing))}; "
                f"it has {names or 'none'}"
            )
        cpp, files = _archive_io.read(archive.source, device, wanted, _restore_shapes)
    if _extra_files is not None:
        _extra_files.update((name, files[name]) for name in wanted)
    module = wrap_cpp(ScriptModule, cpp)
    loaded: ScriptModule = _archive_io.finish(module, files[_archive_io.RECORD])
    return loaded
