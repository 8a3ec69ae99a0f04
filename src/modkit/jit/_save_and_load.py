"""``save`` and ``load``: archives that torch, C++ and modkit read."""

import os
from collections.abc import Collection, Iterable, Mapping, MutableMapping
from typing import Any, cast

import torch

from modkit.errors import shown
from modkit.files.torchscript_files import verified_archive
from modkit.jit import _archives
from modkit.jit._from_torch import wrap_cpp
from modkit.jit._script_module import ScriptModule
from modkit.jit._upstream import give_notice, validate_map_location


def save(m: Any, f: Any, _extra_files: Mapping[str, str | bytes] | None = None) -> None:
    """Write a ScriptModule or a ScriptFunction, with its code, to an archive.

    Args:
        m: A ScriptModule, a ScriptFunction, or an object with methods ``save`` and
            ``save_to_buffer``.
        f: A path, or a file that is open for writing.
        _extra_files: Further files for the archive: name to content, as str or bytes.

    modkit: A path is written atomically. On a full disk, where torch ends the process, an OSError
    is raised and the previous file stays. For that the archive is made in memory, which takes three
    times its size. Buffers that are not persistent stay so when the archive is loaded.

    Raises:
        AttributeError: If ``m`` is not compiled.
        RuntimeError: If the folder does not exist, or compiled code calls a method of Python.
        OSError: If the file cannot be written.
    """
    give_notice("save")
    files = dict(_extra_files or {})
    # Torch's method, which user classes inherit, writes the path in C++.
    torch_save: object = getattr(torch.jit.ScriptModule, "save", None)
    if isinstance(m, torch.jit.ScriptFunction) or getattr(type(m), "save", m) is torch_save:
        _archives.save_compiled(getattr(m, "_c", m), f, files)
    elif isinstance(f, (str, os.PathLike)):
        m.save(f, _extra_files=files)
    else:
        f.write(m.save_to_buffer(_extra_files=files))


def load(
    f: Any,
    map_location: torch.device | str | None = None,
    _extra_files: MutableMapping[str, Any] | None = None,
    _restore_shapes: bool = False,
    *,
    sha256: str | None = None,
    strict_extra_files: bool = False,
) -> ScriptModule:
    """Read an archive that modkit, torch or C++ has written, and verify its checksums.

    Loading runs code from the archive, so load only files that you trust.

    Args:
        f: A path, or a file that is open for reading.
        map_location: Device of the tensors; by default the one that they were saved from.
        _extra_files: Dict of the extra files to read, filled in as bytes; a missing file is
            ``b""``.
        _restore_shapes: Run the module with the inputs that it was traced with.
        sha256: Expected digest of the file.
        strict_extra_files: Whether a missing extra file is an error.

    Returns:
        The module, in the mode in which it was saved.

    modkit: Checksums are verified, and a corrupt file is an error. Flatbuffers, which
    ``save_jit_module_to_flatbuffer`` writes, have no checksums: a corrupt one may end the process.
    In the result, parameters are of type ``Parameter``, a shared module is one object, and buffers
    are persistent or not as they were for ``modkit.jit.save``. A file that was just written is read
    from its start. With the environment variable ``PYTORCH_JIT=0``, archives are loaded, too.

    Keyword Args:
        sha256: Expected digest of the file, as ``sha256sum`` prints it.
        strict_extra_files: Whether a missing extra file is an error.

    Raises:
        ValueError: If the file does not exist or has another digest, or ``map_location`` is not a
            device.
        KeyError: If an extra file is missing and ``strict_extra_files`` is True.
        FileError: If the file is corrupt or not a TorchScript archive. The text names its format.
        RuntimeError: If the device is not available, or torch cannot load the archive.
        TypeError: If ``_extra_files`` is not a dict.

    Example:
        >>> import io, torch
        >>> from modkit import jit
        >>> buffer = io.BytesIO()
        >>> jit.save(jit.script(torch.nn.Linear(4, 2)), buffer)
        >>> jit.load(buffer).weight.shape
        torch.Size([2, 4])
    """
    give_notice("load")
    device = validate_map_location(map_location)
    if _extra_files is not None and not isinstance(cast("object", _extra_files), MutableMapping):
        kind = type(_extra_files).__name__
        raise TypeError(f"jit.load(): _extra_files must be a dict of names, got {kind}")
    names = tuple(_extra_files or ())

    with verified_archive(f, sha256) as archive:
        if archive.extra_files is not None:
            _check_extra_files(names, archive.extra_files, strict=strict_extra_files)
        cpp, files = _archives.read(archive, device, names, _restore_shapes)

    # A flatbuffer does not list its files; one that is missing has been read as empty.
    if archive.extra_files is None:
        present = [name for name in names if files[name]]
        _check_extra_files(names, present, strict=strict_extra_files)
    if _extra_files is not None:
        _extra_files.update((name, files[name]) for name in names)
    return cast("ScriptModule", _archives.finish(wrap_cpp(cpp), files[_archives.RECORD]))


def _check_extra_files(asked: Iterable[str], present: Collection[str], *, strict: bool) -> None:
    missing = ", ".join(repr(name) for name in asked if name not in present)
    if missing and strict:
        names = ", ".join(map(repr, present)) or "none"
        raise KeyError(shown(f"the archive has no extra file {missing}; it has {names}"))
