import collections
import types

import pytest
import torch

from tests.cases import for_each
from tests.helpers import Implementation, same
from tests.models import child_leaf, empty, leaf, network, scaling, tree
from tests.parity.module.contents import run


def source(impl: Implementation) -> torch.nn.Module:
    """Build the same tree with other values."""
    module = tree(impl)
    for index, tensor in enumerate(module.state_dict().values()):
        tensor.copy_(torch.full_like(tensor, index + 10))
    return module


def test_a_load_copies_into_the_members(impl: Implementation) -> None:
    """Parameters and buffers keep their identity and take the values."""
    module, other = tree(impl), source(impl)
    parameters, buffers = list(module.parameters()), list(module.buffers())
    result = module.load_state_dict(other.state_dict())

    assert str(result) == repr(result) == "<All keys matched successfully>"
    assert all(a is b for a, b in zip(parameters, module.parameters(), strict=True))
    assert all(a is b for a, b in zip(buffers, module.buffers(), strict=True))
    expected = other.state_dict()
    assert all(torch.equal(value, expected[key]) for key, value in module.state_dict().items())


@pytest.mark.filterwarnings("ignore:.*loaded none of the")
def test_the_result_is_torchs_named_tuple(impl: Implementation) -> None:
    """The result unpacks into the missing and the unexpected keys, and is torch's own class."""
    result = tree(impl).load_state_dict({"bogus": torch.ones(1)}, strict=False)
    missing, unexpected = result

    assert type(result) is torch.nn.modules.module._IncompatibleKeys
    assert result.missing_keys is missing
    assert result.unexpected_keys is unexpected
    assert unexpected == ["bogus"]


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


def test_the_arguments_may_be_given_by_position_or_keyword(impl: Implementation) -> None:
    """``strict`` and ``assign`` are the second and third argument."""
    value = torch.nn.Parameter(torch.zeros(1))
    by_position, by_keyword = child_leaf(impl), child_leaf(impl)
    by_position.load_state_dict({"weight": value, "bogus": 1}, False, True)
    by_keyword.load_state_dict(assign=True, strict=False, state_dict={"weight": value, "bogus": 1})

    assert by_position.weight is by_keyword.weight is value


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


def test_the_callers_mapping_is_not_changed_by_overrides(impl: Implementation) -> None:
    """Overrides edit a copy; the mapping that was passed keeps its entries."""

    class Greedy(impl.Module):
        def _load_from_state_dict(self, state_dict, prefix, *args):
            state_dict.pop(prefix + "surplus", None)
            super()._load_from_state_dict(state_dict, prefix, *args)

    state = {"surplus": torch.ones(1)}
    result = Greedy().load_state_dict(state)

    assert list(state) == ["surplus"]
    assert result.unexpected_keys == []


def test_dtypes_and_layouts_are_converted_by_the_copy(impl: Implementation) -> None:
    """A load keeps the member's dtype and casts the values."""
    module = leaf(impl)
    state = {"weight": torch.ones(2, 3).half() / 3, "mean": torch.arange(3), "steps": 2.0}
    state["steps"] = torch.tensor(2.9)
    module.load_state_dict(state)

    assert module.weight.dtype is torch.float32
    assert torch.equal(module.mean, torch.tensor([0.0, 1.0, 2.0]))
    assert module.steps.item() == 2


def test_old_scalars(impl: Implementation) -> None:
    """One-element vectors load into scalars, as checkpoints before 0.4 have them."""
    module = leaf(impl)
    state = module.state_dict()
    state["steps"] = torch.tensor([11])
    module.load_state_dict(state)

    assert module.steps.shape == ()
    assert module.steps.item() == 11


def test_a_matrix_does_not_load_into_a_scalar():
    """One element in two dimensions does not count as an old scalar."""

    def scenario(impl):
        return leaf(impl).load_state_dict({"steps": torch.ones(1, 1)}, strict=False)

    assert same(scenario)[0] == "raised"


@pytest.mark.parametrize("elements", [0, 2])
def test_only_one_element_loads_into_a_scalar(impl: Implementation, elements: int) -> None:
    """A vector of another length than one is a size mismatch."""
    with pytest.raises(RuntimeError, match="size mismatch for steps: copying a param with shape"):
        leaf(impl).load_state_dict({"steps": torch.ones(elements)}, strict=False)


def test_a_scalar_does_not_load_into_a_vector():
    """The tolerance for scalars is for the member's side only."""

    def scenario(impl):
        return child_leaf(impl).load_state_dict({"weight": torch.tensor(1.0)})

    assert same(scenario)[0] == "raised"


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


def test_tensor_like_values_are_offered_to_the_copy():
    """An object with ``__torch_function__`` passes the type check, and fails where torch fails."""

    class Like:
        shape = torch.Size([1])
        is_meta = False

        def size(self):
            return self.shape

        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            target = args[0]
            target.data.fill_(5)
            return target

    def scenario(impl):
        module = child_leaf(impl)
        result = module.load_state_dict({"weight": Like()})
        return result, module.weight

    assert same(scenario)[0] == "returned"


def test_parameters_as_values(impl: Implementation) -> None:
    """A checkpoint saved with ``keep_vars`` loads; the values' gradients play no part."""
    module, other = tree(impl), source(impl)
    module.load_state_dict(other.state_dict(keep_vars=True))

    assert torch.equal(module.gain, other.gain)
    assert module.gain is not other.gain
    assert module.gain.is_leaf


def test_loading_under_grad_mode_records_nothing(impl: Implementation) -> None:
    """The copy runs without autograd, also into buffers that require grad."""
    module = empty(impl)
    module.register_buffer("x", torch.ones(2, requires_grad=True))
    module.load_state_dict({"x": torch.zeros(2, requires_grad=True) * 1})

    assert module.x.is_leaf
    assert module.x.tolist() == [0.0, 0.0]


def test_a_module_loads_its_own_state(impl: Implementation) -> None:
    """Loading what aliases the members changes nothing."""
    module = tree(impl)
    before = {key: value.clone() for key, value in module.state_dict().items()}
    module.load_state_dict(module.state_dict())

    assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items())


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


def test_assign_takes_dtype_and_device(impl: Implementation) -> None:
    """With ``assign`` the checkpoint decides dtype and device."""
    module = leaf(impl).to("meta")
    state = {
        name: torch.ones(t.shape).to(torch.float64) for name, t in leaf(impl).state_dict().items()
    }
    module.load_state_dict(state, assign=True)

    assert {tensor.dtype for tensor in module.state_dict().values()} == {torch.float64}
    assert not module.weight.is_meta


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


def test_copying_into_meta_members_warns_per_tensor(impl: Implementation) -> None:
    """A copy into a meta tensor does nothing, and each tensor has a warning that says so."""
    module = leaf(impl).to("meta")
    with pytest.warns(UserWarning, match="which is a no-op") as caught:
        result = module.load_state_dict(leaf(impl).state_dict())

    assert [str(w.message).split(":")[0] for w in caught] == ["for weight", "for mean", "for steps"]
    assert module.weight.is_meta
    assert str(result) == "<All keys matched successfully>"


def test_the_text_of_the_meta_warning():
    """The advice to use ``assign=True`` has torch's words."""

    def scenario(impl):
        return child_leaf(impl).to("meta").load_state_dict(child_leaf(impl).state_dict())

    assert same(scenario)[:2] == ("raised", "UserWarning")


def test_meta_into_meta_is_silent(impl: Implementation) -> None:
    """A meta checkpoint loads into a meta module without a word."""
    result = tree(impl).to("meta").load_state_dict(tree(impl).to("meta").state_dict())

    assert str(result) == "<All keys matched successfully>"


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


@pytest.mark.parametrize("layer", ["BatchNorm1d", "BatchNorm2d", "SyncBatchNorm"])
def test_batch_norm_checkpoints_from_before_the_counter(impl: Implementation, layer: str) -> None:
    """A checkpoint without version 2 has no counter; the module's own is kept, or zero."""
    module = getattr(impl.own, layer)(3)
    state = {
        key: torch.full((3,), 2.0) for key in ("weight", "bias", "running_mean", "running_var")
    }
    result = module.load_state_dict(state)

    assert str(result) == "<All keys matched successfully>"
    assert module.num_batches_tracked.item() == 0
    assert torch.equal(module.running_mean, torch.full((3,), 2.0))


def test_batch_norm_checkpoints_of_version_two_must_have_the_counter():
    """With the version in the metadata a missing counter is reported."""

    def scenario(impl):
        module = impl.own.Sequential(impl.own.BatchNorm2d(3))
        state = module.state_dict()
        del state["0.num_batches_tracked"]
        return module.load_state_dict(state)

    assert same(scenario)[0] == "raised"


def test_batch_norm_without_statistics(impl: Implementation) -> None:
    """A BatchNorm that tracks nothing has no buffers to load."""
    module = impl.own.BatchNorm1d(3, track_running_stats=False)
    result = module.load_state_dict(module.state_dict())

    assert list(module.state_dict()) == ["weight", "bias"]
    assert result.missing_keys == []


def test_checkpoints_move_between_torch_and_modkit(impl: Implementation) -> None:
    """A state dict of either implementation loads strictly into the other, metadata included."""
    from tests.helpers import MODKIT, TORCH

    other = {"torch": MODKIT, "modkit": TORCH}[impl.name]
    module, twin = tree(impl), source(other)
    module.load_state_dict(twin.state_dict())

    assert torch.equal(module.gain, twin.gain)
    assert module.state_dict()._metadata == twin.state_dict()._metadata


def different_state(impl: Implementation) -> dict[str, torch.Tensor]:
    """Make a complete state for a network, with other values than a new network has."""
    return {name: torch.full_like(t, 3) for name, t in network(impl).state_dict().items()}


def test_loaded_values_are_copies(impl: Implementation) -> None:
    """Later changes of the loaded tensors do not reach the module."""
    model = network(impl)
    state = different_state(impl)
    model.load_state_dict(state)
    state["scale"].zero_()

    assert torch.equal(model.scale, torch.full((3,), 3.0))


def test_assign_fills_a_module_without_storage(impl: Implementation) -> None:
    """With assign=True, a module on the meta device gets the tensors of the state dict."""
    model = network(impl).to("meta")
    model.load_state_dict(different_state(impl), assign=True)

    assert {t.device.type for t in model.state_dict().values()} == {"cpu"}
    assert isinstance(model.scale, torch.nn.Parameter)
    assert torch.equal(model.scale, torch.full((3,), 3.0))


def test_optimizer_must_be_created_after_assigning(impl: Implementation) -> None:
    """With assign=True the parameters are new: an earlier optimizer does not update them."""
    model = scaling(impl, 1.0)
    early = torch.optim.SGD(model.parameters(), lr=1.0)
    old = model.factor
    model.load_state_dict({"factor": torch.tensor([3.0])}, assign=True)
    late = torch.optim.SGD(model.parameters(), lr=1.0)
    model(torch.ones(1)).sum().backward()

    assert model.factor is not old

    early.step()

    assert model.factor.item() == 3.0

    late.step()

    assert model.factor.item() == 2.0


def test_optimizer_stays_valid_after_copying(impl: Implementation) -> None:
    """With assign=False an optimizer from before the load updates the module."""
    model = scaling(impl, 1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model.load_state_dict({"factor": torch.tensor([3.0])})
    model(torch.ones(1)).sum().backward()
    optimizer.step()

    assert model.factor.item() == 2.0
