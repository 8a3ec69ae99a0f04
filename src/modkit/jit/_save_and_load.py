"""``save`` and ``load``: archives that torch, C++ and modkit read."""

import os
from collections.abc import Mapping, MutableMapping
from typing import Any, cast

import torch

from modkit._messages import add_note
from modkit.files.torch_files import verified_archive
from modkit.jit import _archives
from modkit.jit._from_torch import WRAPPERS, wrap_cpp
from modkit.jit._script_module import ScriptModule
from modkit.jit._upstream import give_notice


def save(m: Any, f: Any, _extra_files: Mapping[str, str | bytes] | None = None) -> None:
    """Write a ScriptModule or a ScriptFunction, with its code, to an archive.

    Args:
        m: A ScriptModule, a ScriptFunction, or any object with their methods ``save`` and
            ``save_to_buffer``.
        f: A path, which is written atomically, or a file that is open for writing.
        _extra_files: Further files for the archive: name to content.

    Raises:
        AttributeError: ``m`` is not compiled.
        RuntimeError: The folder does not exist, or compiled code calls a method of Python.

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
    if isinstance(m, torch.jit.ScriptFunction) or type(m) in WRAPPERS:
        cpp = m if isinstance(m, torch.jit.ScriptFunction) else m._c
        _archives.save_compiled(cpp, f, dict(_extra_files or {}))
    elif isinstance(f, (str, os.PathLike)):
        m.save(f, _extra_files=dict(_extra_files or {}))
    else:
        f.write(m.save_to_buffer(_extra_files=dict(_extra_files or {})))


def load(
    f: Any,
    map_location: torch.device | str | None = None,
    _extra_files: MutableMapping[str, Any] | None = None,
    _restore_shapes: bool = False,
    *,
    sha256: str | None = None,
    strict_extra_files: bool = False,
) -> ScriptModule:
    """Read an archive that ``save``, torch or C++ has written, and verify its checksums.

    Loading runs code from the archive, so load only files that you trust. ``sha256`` refuses any
    file but the expected one.

    Args:
        f: A path, or a file that is open for reading.
        map_location: Device to put the tensors on; by default the one that they were saved from.
        _extra_files: Names of extra files to read; their content is filled in as bytes, that of a
            missing file as ``b""``.
        _restore_shapes: Run the module with the inputs that it was traced with.
        sha256: Expected digest of the file, as ``sha256sum`` prints it.
        strict_extra_files: Raise an error if an extra file is missing.

    Raises:
        ValueError: There is no such file, it has another digest, or ``map_location`` is not a device.
        KeyError: An extra file is missing and ``strict_extra_files`` is set.
        FileError: The file is corrupt or not a TorchScript archive. The text names its format, and
            what reads it.
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

    Differs from torch: parameters are of type ``Parameter``, a shared module is one object, and a
    corrupt file is an error.
    """
    give_notice()
    device = checked_map_location(map_location)
    wanted = tuple(_extra_files or ())
    with verified_archive(f, sha256) as archive:
        missing = [name for name in wanted if name not in archive.extra_files]
        if missing and strict_extra_files:
            names = ", ".join(map(repr, archive.extra_files))
            raise KeyError(
                f"the archive has no extra file {', '.join(map(repr, missing))}; "
                f"it has {names or 'none'}"
            )
        cpp, files = _archives.read(archive.source, device, wanted, _restore_shapes)
    if _extra_files is not None:
        _extra_files.update((name, files[name]) for name in wanted)
    module = wrap_cpp(cpp)
    loaded: ScriptModule = _archives.finish(module, files[_archives.RECORD])
    return loaded


def checked_map_location(map_location: str | torch.device | None) -> torch.device | None:
    """Return the device that tensors are loaded to, if this machine has it.

    Args:
        map_location: A device or its name; None for where each tensor was when it was saved.

    Returns:
        The device, or None.

    Raises:
        ValueError: It is neither; the text is that of ``torch.jit.load``.
        RuntimeError: It is not a device, or this machine has no such device. The text, or a note
            below it, names the available ones.

    Example:
        >>> checked_map_location("cpu")
        device(type='cpu')

    Differs from torch: every kind of device is looked for before anything is read, not only CUDA.
    """
    if map_location is None:
        return None
    if isinstance(map_location, str):
        try:
            device = torch.device(map_location)
        except RuntimeError as error:
            add_note(error, _available())
            raise
    elif isinstance(cast("object", map_location), torch.device):
        device = map_location
    else:
        wrong = ValueError(
            "map_location should be either None, string or torch.device, "
            f"but got type: {type(map_location)}"
        )
        add_note(wrong, "Unlike torch.load, loading TorchScript moves all tensors to one device.")
        raise wrong
    count = _count(device.type)
    if count == 0:
        raise RuntimeError(f"map_location={map_location!r}: no such device here. {_available()}")
    index = cast("int | None", device.index)
    if index is not None and index >= count and device.type not in {"cpu", "meta"}:
        raise RuntimeError(
            f"map_location={map_location!r}: there is no number {index} here. {_available()}"
        )
    return device


def _count(kind: str) -> int:
    """Return how many devices of a kind there are here; those without numbers count as one."""
    if kind in {"cpu", "meta"}:
        return 1
    try:
        backend: Any = torch.get_device_module(kind)
    except RuntimeError:
        return 0
    is_available = getattr(backend, "is_available", None)
    if is_available is not None:
        available = bool(is_available())
    else:
        # Apple's backend has the function in another module.
        available = kind == "mps" and torch.backends.mps.is_available()
    if not available:
        return 0
    counted = getattr(backend, "device_count", None)
    return int(counted()) if counted is not None else 1


def _available() -> str:
    found = ["cpu"]
    accelerator = torch.accelerator.current_accelerator()
    kinds = {"cuda", "xpu", "mps", "mtia", "hpu", *([accelerator.type] if accelerator else [])}
    for kind in sorted(kinds):
        count = _count(kind)
        found += [kind] if count == 1 else [f"{kind}:0 to {kind}:{count - 1}"] if count else []
    return f"Available: {', '.join(found)}, meta."
