"""Hooks that another thread adds or removes during a call; tables let it in at a given point."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
from torch.utils.hooks import RemovableHandle

from tests.helpers import Implementation
from tests.parity.hooks.tools import do_nothing


REGISTRARS = pytest.mark.parametrize(
    ("registrar", "table", "count"),
    [
        ("register_forward_pre_hook", "_forward_pre_hooks", 3),
        ("register_forward_hook", "_forward_hooks", 4),
    ],
    ids=["pre_hook", "hook"],
)


class Table(OrderedDict[int, Any]):
    """A hook table that does something when an entry was written, or around its entries being read."""

    after_write: Callable[[], object] = do_nothing
    before_read: Callable[[], object] = do_nothing
    after_read: Callable[[], object] = do_nothing

    def __setitem__(self, key: int, value: object) -> None:
        super().__setitem__(key, value)
        self.after_write()

    def items(self) -> Any:
        """Return the entries as they are now, as a call gets them."""
        self.before_read()
        entries = list(super().items())
        self.after_read()
        return entries


def with_table(impl: Implementation, name: str) -> tuple[Any, Table]:
    """Return a module, and such a table in the place of one of its own."""
    module, hooks = impl.own.Identity(), Table()
    setattr(module, name, hooks)
    return module, hooks


@REGISTRARS
def test_a_call_during_a_registration_sees_a_hook_with_its_flag(
    impl: Implementation, registrar: str, table: str, count: int
) -> None:
    """A call between the entry of a hook and the end of its registration passes it keywords."""
    calls: list[int] = []
    module, hooks = with_table(impl, table)
    hooks.after_write = lambda: module(1)
    getattr(module, registrar)(lambda *given: calls.append(len(given)), with_kwargs=True)

    assert calls == [count]


@REGISTRARS
def test_a_removal_during_a_call_leaves_no_hook_without_its_flag(
    impl: Implementation, registrar: str, table: str, count: int
) -> None:
    """A hook that leaves after a call has read the table runs with its flag, or not at all."""
    calls: list[int] = []
    module, hooks = with_table(impl, table)
    handle = getattr(module, registrar)(lambda *given: calls.append(len(given)), with_kwargs=True)
    hooks.after_read = handle.remove
    module(1)

    assert set(calls) <= {count}


@REGISTRARS
def test_a_hook_that_comes_and_goes_during_a_call_has_its_flag(
    impl: Implementation, registrar: str, table: str, count: int
) -> None:
    """A hook that is added before a call reads the table, and removed after, has its flag or does not run."""
    calls: list[int] = []
    module, hooks = with_table(impl, table)
    getattr(module, registrar)(do_nothing)

    def come() -> None:
        hooks.before_read = do_nothing
        hook = lambda *given: calls.append(len(given))
        hooks.after_read = getattr(module, registrar)(hook, with_kwargs=True).remove

    hooks.before_read = come
    module(1)

    assert set(calls) <= {count}


class AtWork(int):
    """An id in a pickle, beside which another thread gets ids when it is read."""

    def __int__(self) -> int:
        RemovableHandle.next_id += 100
        return super().__int__()


def test_unpickling_does_not_set_ids_back_that_another_thread_got(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ids that are given while a module is unpickled are not given again."""
    from modkit.nn._hooks import reserve_ids

    monkeypatch.setattr(RemovableHandle, "next_id", 10)
    reserve_ids({"_forward_hooks": {AtWork(20): do_nothing}})

    assert RemovableHandle.next_id == 110
