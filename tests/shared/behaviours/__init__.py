"""The shared behaviours: functions of torch or modkit, by area and name.

A case gives equal results with both libraries, or is listed in ``differences.py`` with both results.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from modkit.compat.outcomes import Library


Case = Callable[[Library], Any]
Cases = dict[str, Case]


def tried(function: Callable[..., Any], *arguments: Any, **kwargs: Any) -> Any:
    """Return the result of a function, or its exception as text."""
    try:
        return function(*arguments, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def on_net(table: Mapping[str, Callable[[Any], Any]]) -> Cases:
    """Turn functions of the standard network into cases, which also compare the network after that."""

    def case(lib: Library, function: Callable[[Any], Any]) -> Any:
        net = lib.net()
        return tried(function, net), net

    return {name: partial(case, function=function) for name, function in table.items()}


def each(function: Callable[..., Any], table: Mapping[str, Mapping[str, Any]]) -> Cases:
    """Turn a table of keyword arguments into cases."""
    return {name: partial(function, **options) for name, options in table.items()}


def hooked(net: Any, method: str, *hooks: Any, **options: Any) -> Any:
    """Register hooks, and return the network."""
    for hook in hooks:
        getattr(net, f"register_{method}")(hook, **options)
    return net


def areas() -> dict[str, Cases]:
    """Return all cases by area and name, those with a listed difference among them."""
    from modkit.compat.behaviours import hooks, module, state, tools
    from modkit.compat.behaviours.differences import DIFFERENCES

    found = {**module.AREAS, **hooks.AREAS, **state.AREAS, **tools.AREAS}
    for key, difference in DIFFERENCES.items():
        area, _, name = key.partition(": ")
        found[area][name] = difference.case
    return found
