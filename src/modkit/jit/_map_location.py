"""Where the tensors of an archive can go on this machine."""

from typing import Any, cast

import torch

from modkit._messages import add_note


def checked_map_location(map_location: str | torch.device | None) -> torch.device | None:
    """Return the device that tensors are loaded to, if this machine has it.

    Args:
        map_location: A device or its name; None for where each tensor was when it was saved.

    Returns:
        The device, or None.

    Raises:
        ValueError: It is neither; the text is that of ``torch.jit.load``.
        RuntimeError: It is no device, or there is none of that kind or number here. The text, or a
            note below it, names what there is.

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
        # Apple's backend tells it in another place.
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
