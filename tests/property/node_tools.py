"""The log that the hooks and the user classes of the random trees write."""

from typing import Any, Final

import torch


# The log of the side that is running.
LOG: Final[list[Any]] = []


def override(base: type, method: str) -> type:
    """Make a subclass whose method logs its arguments and passes them on."""

    def logging(self: Any, *args: Any, **kwargs: Any) -> Any:
        keywords = [(name, summary(value)) for name, value in kwargs.items()]
        LOG.append((method, [summary(value) for value in args], keywords))
        return getattr(super(overriding, self), method)(*args, **kwargs)

    overriding = type("Overriding", (base,), {method: logging})
    return overriding


def summary(value: Any) -> Any:
    """Describe an argument so that both implementations compare equal."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.nn.Module):
        return type(value).__name__
    if callable(value):
        return "callable"
    for kind in (list, set, dict):
        if isinstance(value, kind):
            return kind.__name__, len(value)
    return type(value).__name__


def plain_text(message: object) -> str:
    """Return the text of an error, with modkit's homes named like torch's."""
    return str(message).replace("nodes_modkit", "nodes_torch").replace("modkit.nn.", "torch.nn.")
