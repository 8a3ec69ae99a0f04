import copy
import gc
import io

import pytest
import torch
from torch.utils.hooks import RemovableHandle

from tests.cases import for_each
from tests.helpers import Implementation
from tests.parity.hooks.tools import (
    MODULE_REGISTRARS,
    do_nothing,
    leaf,
    noting,
)


@for_each("registrar", MODULE_REGISTRARS)
def test_a_handle_removes_its_hook(impl: Implementation, registrar: str) -> None:
    """Once, or twice, or at the end of a block, from the table of the hook (rule 1)."""
    owner = impl.own.Identity()
    hook = noting([], "ran")
    handle = getattr(owner, registrar)(hook=hook)
    table = handle.hooks_dict_ref()

    assert type(handle) is RemovableHandle
    assert list(table) == [handle.id]

    handle.remove()
    handle.remove()

    assert list(table) == []

    with pytest.raises(ZeroDivisionError), getattr(owner, registrar)(hook) as handle:
        assert list(table) == [handle.id]
        _ = 1 / 0

    assert list(table) == []


def test_a_handle_refers_to_the_tables_weakly(impl: Implementation) -> None:
    """To the hook's own and those of its options, from which it is removed as well (rule 1)."""
    module = impl.own.Identity()
    options = {"with_kwargs": True, "always_call": True}
    handle = module.register_forward_hook(do_nothing, **options)
    other = module.register_forward_hook(do_nothing, **options)
    tables = (handle.hooks_dict_ref, *handle.extra_dict_ref)
    own = module._forward_hooks, module._forward_hooks_with_kwargs
    own = (*own, module._forward_hooks_always_called)
    handle.remove()

    assert all(table() is mine for table, mine in zip(tables, own, strict=True))
    assert [list(mine) for mine in own] == [[other.id]] * 3

    del module, own
    gc.collect()

    assert [table() for table in tables] == [None, None, None]
    assert other.remove() is None


def saved(module: torch.nn.Module) -> torch.nn.Module:
    """Send the module through torch.save and torch.load."""
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


RAN: list[object] = []


def note_module(module: object, *_arguments: object) -> None:
    """Be a hook that can be pickled, and note the module that it is called with."""
    RAN.append(module)


@pytest.mark.parametrize("route", [copy.deepcopy, saved])
def test_copies_have_the_hooks(impl: Implementation, route) -> None:
    """In tables of their own, with the same ids and options, called with the copy (rule 2)."""
    module = impl.own.Identity()
    module.register_forward_pre_hook(note_module, with_kwargs=True)
    handle = module.register_forward_hook(note_module, with_kwargs=True, always_call=True)
    module.register_full_backward_pre_hook(note_module)
    module.register_full_backward_hook(note_module)
    module.register_state_dict_pre_hook(note_module)
    module._register_state_dict_hook(note_module)
    module.register_load_state_dict_pre_hook(note_module)
    module.register_load_state_dict_post_hook(note_module)
    copied = route(module)
    tables = {name: list(table) for name, table in vars(module).items() if "hooks" in name}
    handle.remove()

    assert {name: list(getattr(copied, name)) for name in tables} == tables
    assert all(len(table) == 1 for table in tables.values())
    assert not module._forward_hooks

    RAN.clear()
    copied(leaf()).sum().backward()
    copied.load_state_dict(copied.state_dict())

    assert len(RAN) == 8
    assert all(each is copied for each in RAN)
