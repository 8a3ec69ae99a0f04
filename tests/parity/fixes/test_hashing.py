import collections.abc
import dataclasses

import pytest
import torch

from tests.capabilities import MODULES_CAN_REPEAT
from tests.helpers import Implementation


def mapping(impl: Implementation) -> type:
    """Return a class of modules that are mappings, which cannot be hashed."""

    class Bag(impl.Module, collections.abc.Mapping):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(1))
            self.register_buffer("mean", torch.zeros(1))

        def __getitem__(self, key):
            raise KeyError(key)

        def __iter__(self):
            return iter(())

        def __len__(self):
            return 0

    return Bag


def data_class(impl: Implementation, **options: bool) -> type:
    """Return a class of modules that compare by their fields."""

    @dataclasses.dataclass(**options)
    class Scale(impl.Module):
        size: int = 1

        def __post_init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(self.size))
            self.register_buffer("mean", torch.zeros(self.size))

    return Scale


WALKS = {
    "parameters": lambda m: len(list(m.parameters())),
    "named_parameters": lambda m: [name for name, _ in m.named_parameters()],
    "all_parameters": lambda m: len(list(m.named_parameters(remove_duplicate=False))),
    "buffers": lambda m: len(list(m.buffers())),
    "named_buffers": lambda m: [name for name, _ in m.named_buffers()],
    "modules": lambda m: len(list(m.modules())),
    "named_modules": lambda m: [name for name, _ in m.named_modules()],
    "apply": lambda m: m.apply(lambda each: None) is m,
    "double": lambda m: m.double()._modules["a"].weight.dtype,
    "zero_grad": lambda m: m.zero_grad(),
}
if MODULES_CAN_REPEAT:
    WALKS["all_modules"] = lambda m: len(list(m.modules(remove_duplicate=False)))


def family(impl: Implementation, child: type) -> torch.nn.Module:
    """Return a module that holds one child twice, and another one of the same class."""
    root = impl.Module()
    shared = child()
    root.a, root.again, root.b = shared, shared, child()
    return root


@pytest.mark.parametrize("walk", WALKS)
@pytest.mark.parametrize("kind", [mapping, data_class])
def test_modules_that_cannot_be_hashed_are_walked(impl: Implementation, kind, walk: str) -> None:
    """Mappings and dataclasses are told apart by identity, like modules of any other class."""

    class Ordinary(impl.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(1))
            self.register_buffer("mean", torch.zeros(1))

    result = WALKS[walk](family(impl, kind(impl)))

    assert result == WALKS[walk](family(impl, Ordinary))


@pytest.mark.parametrize("kind", [mapping, data_class])
def test_a_root_that_cannot_be_hashed_is_walked(impl: Implementation, kind) -> None:
    """The module itself may be one that cannot be hashed."""
    root = kind(impl)()

    assert [name for name, _ in root.named_modules()] == [""]
    assert next(iter(root.parameters())) is root.weight
    assert [name for name, _ in root.named_buffers()] == ["mean"]


def test_modules_that_compare_equal_are_both_walked(impl: Implementation) -> None:
    """Two modules with equal fields are two modules, each with parameters of its own."""
    scale = data_class(impl, unsafe_hash=True)
    root = impl.Module()
    root.a, root.b = scale(2), scale(2)
    root.again = root.b

    assert root.a == root.b
    assert [name for name, _ in root.named_modules()] == ["", "a", "b"]
    assert [id(each) for each in root.modules()] == [id(root), id(root.a), id(root.b)]
    assert [id(each) for each in root.parameters()] == [id(root.a.weight), id(root.b.weight)]


def test_a_memo_of_the_callers_is_filled_with_what_can_be_hashed(impl: Implementation) -> None:
    """A set that the caller passes receives the modules that a set can hold."""
    root = family(impl, mapping(impl))
    root.c = impl.Module()
    memo = {root.c}
    names = [name for name, _ in root.named_modules(memo)]

    assert names == ["", "a", "b"]
    assert memo == {root, root.c}


def test_an_override_passes_on_what_cannot_be_hashed(impl: Implementation) -> None:
    """A module below an override and elsewhere is yielded once, though a set cannot hold it."""
    memos = []

    class Wrapper(impl.Module):
        def named_modules(self, memo=None, prefix="", remove_duplicate=True):
            memos.append(memo)
            yield from super().named_modules(memo, prefix, remove_duplicate)

    shared = mapping(impl)()
    root = impl.Module()
    root.first, root.wrapper = shared, Wrapper()
    root.wrapper.inside, root.wrapper.own = shared, mapping(impl)()
    root.last, root.end = root.wrapper.own, shared
    names = [name for name, _ in root.named_modules()]
    found = [*root.modules()]

    assert names == ["", "first", "wrapper", "wrapper.own"]
    assert [id(each) for each in found] == [id(dict(root.named_modules())[name]) for name in names]
    assert all(isinstance(memo, set) for memo in memos)
    assert root in memos[0]
