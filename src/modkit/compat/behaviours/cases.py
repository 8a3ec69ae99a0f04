"""Functions that turn tables of behaviors into cases."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from modkit.compat.outcomes import Library


Case = Callable[[Library], Any]
Cases = Mapping[str, Case]
# Functions of one network, by the name of the case.
Uses = Mapping[str, Callable[[Any], Any]]


def tried(function: Callable[..., Any], *arguments: Any, **kwargs: Any) -> Any:
    """Return the result of a function, or its exception as text."""
    try:
        return function(*arguments, **kwargs)
    except Exception as error:  # noqa: BLE001 - the exception is the result
        return f"{type(error).__name__}: {error}"


def on_net(table: Uses) -> Cases:
    """Turn functions of the standard network into cases; the network is compared, too."""

    def case(lib: Library, function: Callable[[Any], Any]) -> Any:
        net = lib.net()
        return tried(function, net), net

    return {name: partial(case, function=function) for name, function in table.items()}


def cases_of(function: Callable[..., Any], table: Mapping[str, Mapping[str, Any]]) -> Cases:
    """Turn a table of keyword arguments into cases."""
    return {name: partial(function, **options) for name, options in table.items()}


def hooked(net: Any, method: str, *hooks: Any, **options: Any) -> Any:
    """Register hooks."""
    for hook in hooks:
        getattr(net, f"register_{method}")(hook, **options)
    return net
