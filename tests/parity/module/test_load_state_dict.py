import collections
import collections.abc
import types

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.cases import for_each
from tests.helpers import Implementation, same
from tests.models import child_leaf, empty, leaf, tree
from tests.parity.module.contents import run


def source(impl: Implementation) -> torch.nn.Module:
    """Build the same tree with other values."""
    module = tree(impl)
    for index, tensor in enumerate(module.state_dict().values()):
        tensor.copy_(torch.full_like(tensor, index + 10))
    return module


@for_each(
    "checkpoint",
    [
        {},
        {"gain": torch.zeros(2)},
        {"bogus": torch.ones(1), "left.bogus": 3, "left.inner.bogus.deeper": None},
        {"right.scratch": torch.ones(1), "right.unset": torch.ones(1), "right.bias": 1},
        {"nothing_at_all.x": 1, "left": 2, "": 3, ".": 4, "left.": 5, "left..x": 6},
        {"gain.deeper": 1, "left.scale.deeper": 2, "right.weight.a.b": 3},
        {"_extra_state": 1, "left._extra_state": 2, "right._extra_state": 3},
        {"again.weight": torch.zeros(2, 3), "right.weight": torch.ones(2, 3)},
        {"leftover": 1, "lef": 2, "left_inner.weight": 3, "gainX": 4},
    ],
    ids=lambda checkpoint: ",".join(checkpoint) or "empty",
)
@pytest.mark.filterwarnings("ignore:.*loaded none of the")
def test_loading_without_strict_lists_what_does_not_match(checkpoint):
    """``strict=False`` loads what fits and returns the other keys in torch's order."""

    def scenario(impl):
        module = tree(impl)
        result = module.load_state_dict(checkpoint, strict=False)
        return result, repr(result), dict(module.state_dict())

    assert same(scenario)[0] == "returned"


@for_each(
    "wrap",
    [
        dict,
        collections.OrderedDict,
        collections.UserDict,
        types.MappingProxyType,
        lambda state: collections.ChainMap({}, dict(state)),
        lambda state: collections.defaultdict(lambda: None, state),
    ],
    ids=["dict", "OrderedDict", "UserDict", "MappingProxyType", "ChainMap", "defaultdict"],
)
def test_any_mapping_is_accepted(wrap):
    """A mapping of any kind is read, and neither it nor its metadata is changed."""

    def scenario(impl):
        module, state = tree(impl), source(impl).state_dict()
        mapping = wrap(state)
        result = module.load_state_dict(mapping)
        return result, dict(module.state_dict()), list(mapping) == list(state)

    assert same(scenario)[0] == "returned"


class Consumed(collections.abc.Mapping):
    """Gives each entry away, as a stream does: it can be read once."""

    def __init__(self, entries):
        self._entries = dict(entries)

    def __getitem__(self, key):
        return self._entries.pop(key)

    def __iter__(self):
        return iter([*self._entries])

    def __len__(self):
        return len(self._entries)


@for_each("hooked", [False, True])
@for_each("version", [1, 2])
def test_a_mapping_that_is_no_dict_has_versions(hooked, version):
    """By the metadata, a layer that lacks an entry is an old one, which brings it, or is not."""

    def scenario(impl):
        module = impl.Module()
        module.norm = torch.nn.BatchNorm1d(2)
        if hooked:
            module.register_load_state_dict_pre_hook(lambda *_: None)
        state = module.state_dict()
        del state["norm.num_batches_tracked"]
        mapping = Consumed(state)
        mapping._metadata = {"": {"version": 1}, "norm": {"version": version}}
        return module.load_state_dict(mapping)

    assert same(scenario)[0] == ("returned" if version == 1 else "raised")


def test_statistics_from_before_torch_0_4_are_refused():
    """Layers that do not track them name them, besides a key that no layer knows."""

    def scenario(impl):
        module = impl.Module()
        module.layers = torch.nn.ModuleList(torch.nn.InstanceNorm1d(2) for _ in range(2))
        state = {f"layers.{i}.running_mean": torch.ones(2) for i in range(2)}
        return module.load_state_dict({**state, "layers.stray": torch.ones(1)})

    result = same(scenario)
    assert result[0] == "raised"
    assert all(name in str(result) for name in ("layers.0", "layers.1", "stray"))


@pytest.mark.parametrize("elements", [0, 2])
def test_only_one_element_loads_into_a_scalar(impl: Implementation, elements: int) -> None:
    """A vector of another length than one is a size mismatch."""
    with pytest.raises(RuntimeError, match="size mismatch for steps: copying a param with shape"):
        leaf(impl).load_state_dict({"steps": torch.ones(elements)}, strict=False)


def test_a_tensor_that_refuses_the_copy_is_reported():
    """An exception during the copy becomes part of the error, with its arguments."""

    class Refusing(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            if func is torch.Tensor.copy_:
                raise ValueError("no copy", 3)
            return super().__torch_function__(func, types, args, kwargs or {})

    def scenario(impl):
        state = tree(impl).state_dict()
        state["gain"] = torch.ones(2).as_subclass(Refusing)
        state["right.mean"] = torch.ones(3).as_subclass(Refusing)
        return tree(impl).load_state_dict(state)

    assert same(scenario)[0] == "raised"


# --- transforms and modes -------------------------------------------------------------------------


class Logging(TorchDispatchMode):
    """Lists the operators that reach it."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operators.append(str(func))
        return func(*args, **(kwargs or {}))


def in_forward_ad(function):
    """Return the value and the tangent of a function of a dual tensor."""
    forward_ad = torch.autograd.forward_ad
    with forward_ad.dual_level():
        values = forward_ad.make_dual(torch.ones(2), torch.full((2,), 5.0))
        return tuple(forward_ad.unpack_dual(function(values)))


def in_dispatch_mode(function):
    """Return the result of a function, and the operators that a mode sees meanwhile."""
    with Logging() as mode:
        result = function(torch.ones(2))
    return result, mode.operators


class Copies(TorchFunctionMode):
    """Lists the functions that copy, and doubles what they copy."""

    def __init__(self) -> None:
        super().__init__()
        self.functions: list[str] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = func.__name__
        if "copy" not in name:
            return func(*args, **(kwargs or {}))
        self.functions.append(name)
        return func(args[0], args[1] * 2)


def in_function_mode(function):
    """Return the result of a function, and the functions that a mode sees meanwhile."""
    with Copies() as mode:
        result = function(torch.ones(2))
    return result, mode.functions


TRANSFORMS = {
    "grad": lambda function: torch.func.grad(lambda x: function(x).sum())(torch.full((2,), 5.0)),
    "jvp": lambda function: torch.func.jvp(function, (torch.ones(2),), (torch.ones(2),)),
    "jacfwd": lambda function: torch.func.jacfwd(function)(torch.ones(2)),
    "vmap": lambda function: torch.vmap(function)(torch.ones(3, 2)),
    "functionalize": lambda function: torch.func.functionalize(function)(torch.ones(2)),
    "forward AD": in_forward_ad,
    "dispatch mode": in_dispatch_mode,
    "function mode": in_function_mode,
}


# Forward AD compiles its decompositions on its first use.
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
@for_each("name", TRANSFORMS)
@for_each("captured", [False, True])
@for_each("assign", [False, True])
def test_a_load_inside_a_transform(name: str, captured: bool, assign: bool) -> None:
    """Transforms, forward AD and modes see a copy of each entry, or refuse it."""

    def scenario(impl):
        def build():
            module = empty(impl)
            module.weight = torch.nn.Parameter(torch.zeros(2))
            module.register_buffer("scale", torch.zeros(2))
            return module

        outside = build()

        def load(values):
            # A transform refuses writes to tensors from outside.
            module = outside if captured else build()
            if not captured:
                module.scale = values * 0
            module.load_state_dict({"weight": torch.ones(2), "scale": values * 2}, assign=assign)
            return module.weight * module.scale

        return TRANSFORMS[name](load)

    same(scenario)


# --- assign ---------------------------------------------------------------------------------------


def test_assign_puts_in_the_tensors(impl: Implementation) -> None:
    """With ``assign`` a buffer becomes the very tensor, a parameter shares its memory."""
    module = tree(impl)
    state = {key: value.clone() for key, value in source(impl).state_dict().items()}
    module.load_state_dict(state, assign=True)

    assert module.right.mean is state["again.mean"]
    assert module.gain is not state["gain"]
    assert module.gain.data_ptr() == state["gain"].data_ptr()
    assert type(module.gain) is torch.nn.Parameter


def test_assign_keeps_the_modules_requires_grad(impl: Implementation) -> None:
    """``requires_grad`` comes from the module, for tensors and parameters alike."""
    module = empty(impl)
    module.a = torch.nn.Parameter(torch.ones(1), requires_grad=False)
    module.b = torch.nn.Parameter(torch.ones(1))
    given = torch.nn.Parameter(torch.zeros(1), requires_grad=False)
    module.load_state_dict({"a": torch.zeros(1), "b": given}, assign=True)

    assert module.a.requires_grad is False
    assert module.b is given
    assert given.requires_grad is True


@for_each(
    "call",
    [
        "m.load_state_dict({'weight': torch.ones(2, 3).int()}, False, True)",
        "m.load_state_dict({'weight': torch.ones(3)}, False, True)",
        "m.load_state_dict({'weight': 'text'}, False, True)",
        "m.load_state_dict({'steps': torch.tensor([3])}, False, True)",
        "m.load_state_dict({'mean': Parameter(torch.zeros(3))}, False, True)",
        "m.load_state_dict({'mean': Buffer(torch.zeros(3))}, False, True)",
        "m.load_state_dict({'weight': torch.ones(2, 3, requires_grad=True) * 2}, False, True)",
        "m.load_state_dict({'mean': torch.ones(3, requires_grad=True) * 2}, False, True)",
        "m.load_state_dict({'weight': non_leaf().reshape(1, 1).expand(2, 3)}, False, True)",
        "m.load_state_dict({'scratch': torch.zeros(1)}, False, True)",
        "m.load_state_dict({'weight': torch.ones(2, 3, device='meta')}, False, True)",
    ],
)
@pytest.mark.filterwarnings("ignore:.*loaded none of the")
def test_assign_of_odd_values(call):
    """Integers, buffers, tensors with history and others are assigned or refused as in torch."""

    def scenario(impl):
        module = leaf(impl)
        try:
            result = repr(run(call, module))
        except RuntimeError as error:
            result = str(error)
        members = {**module._parameters, **module._buffers}
        kinds = [
            (name, type(t).__name__, getattr(t, "is_leaf", None)) for name, t in members.items()
        ]
        return result, kinds, [*module._parameters], [*module._buffers], members

    assert same(scenario)[0] == "returned"


def test_assign_goes_through_setattr(impl: Implementation) -> None:
    """Assigned tensors are set as attributes, so an override of ``__setattr__`` sees them."""
    log = []

    class Logged(impl.Module):
        def __setattr__(self, name, value):
            log.append((name, type(value).__name__))
            super().__setattr__(name, value)

    module = Logged()
    module.w = torch.nn.Parameter(torch.ones(1))
    module.register_buffer("b", torch.ones(1))
    log.clear()
    module.load_state_dict({"w": torch.zeros(1), "b": torch.zeros(1)}, assign=True)

    assert log == [("w", "Parameter"), ("b", "Tensor")]


# --- meta and lazy --------------------------------------------------------------------------------


def test_uninitialized_members_and_values():
    """Uninitialized parameters on either side end as in torch."""

    def scenario(impl):
        found = []
        for target, value in (("lazy", "real"), ("real", "lazy"), ("lazy", "lazy")):
            module = empty(impl)
            kinds = {
                "lazy": torch.nn.UninitializedParameter,
                "real": lambda: torch.nn.Parameter(torch.ones(2)),
            }
            module.weight = kinds[target]()
            for assign in (False, True):
                try:
                    result = repr(module.load_state_dict({"weight": kinds[value]()}, assign=assign))
                except Exception as error:
                    result = (type(error).__name__, str(error))
                found.append((target, value, result, type(module.weight).__name__))
        return found

    assert same(scenario)[0] == "returned"


# --- layers ---------------------------------------------------------------------------------------


@for_each(
    ("name", "value"),
    [
        ("steps", torch.tensor([11])),
        ("steps", torch.ones(1, 1)),
        ("mean", torch.tensor(1.0)),
        ("weight", torch.nn.Parameter(torch.zeros(2, 3))),
    ],
)
def test_values_of_other_shapes_and_kinds(name, value):
    """A vector of one element loads into a scalar, as checkpoints before 0.4 have it; no other does."""

    def scenario(impl):
        module = leaf(impl)
        result = module.load_state_dict({name: value}, strict=False)
        return result, dict(module.state_dict())

    fits = value.shape == (1,) or isinstance(value, torch.nn.Parameter)
    assert same(scenario)[0] == ("returned" if fits else "raised")


@for_each("device", ["cpu", "meta"])
def test_copies_to_the_meta_device(device):
    """A value that is lost has torch's warning, an error here; one without a value has none."""

    def scenario(impl):
        state = child_leaf(impl).to(device).state_dict()
        return child_leaf(impl).to("meta").load_state_dict(state)

    expected = {"cpu": ("raised", "UserWarning"), "meta": ("returned",)}[device]
    assert same(scenario)[: len(expected)] == expected


def test_a_tied_tensor_gets_the_entries_in_the_order_of_the_modules() -> None:
    """A layer fills in an entry of an old state: its own count, which has been loaded by then."""

    def scenario(impl: Implementation) -> tuple[torch.Tensor, bool]:
        model = impl.own.Sequential(impl.nn.BatchNorm1d(1))
        model.register_buffer("count", torch.tensor(0))
        model[0].num_batches_tracked = model.count
        state = {**dict(model.state_dict()), "count": torch.tensor(2)}
        del state["0.num_batches_tracked"]

        model.load_state_dict(state)
        return model.count, model[0].num_batches_tracked is model.count

    assert same(scenario)[0] == "returned"
