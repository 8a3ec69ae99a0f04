import copy
import functools
import inspect
import io

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils import parametrizations, parametrize, prune, spectral_norm, weight_norm
from torch.overrides import TorchFunctionMode

from tests.helpers import MODKIT, TORCH, same
from tests.parity.layers.leaf_cases import LEAVES, PLAIN


WEIGHTED = [name for name in PLAIN if not name.startswith(("BatchNorm", "PReLU", "RMS", "LayerN"))]


@pytest.fixture(params=LEAVES)
def leaf(request):
    """Each layer, with the options that matter to its ``forward``."""
    return LEAVES[request.param]


@pytest.fixture(params=PLAIN)
def plain(request):
    """Each layer once."""
    return LEAVES[request.param]


def _trained(layer, leaf):
    """Return output, gradients and state after a call and its backward pass."""
    inputs = [x.requires_grad_(x.is_floating_point()) for x in leaf.inputs()]
    output = layer(*inputs, **leaf.call)
    output.sin().sum().backward()
    gradients = [tensor.grad for tensor in (*inputs, *layer.parameters())]
    return output, gradients, dict(layer.state_dict())


def _both_modes(layer, leaf):
    return [_trained(layer.train(mode), leaf) for mode in (True, True, False)]


def test_outputs_gradients_and_buffers(leaf):
    """Training and evaluation give torch's bits, or torch's error."""
    same(lambda impl: _both_modes(leaf.build(impl.nn), leaf))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_autocast(plain, dtype):
    """Autocast sees the same operations."""

    def scenario(impl):
        layer = plain.build(impl.nn)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return layer(*plain.inputs()), layer.to(dtype)(
                *(x.to(dtype) if x.is_floating_point() else x for x in plain.inputs())
            )

    same(scenario)


class _Seen(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", str(func))
        self.names.append((name, len(args), sorted(kwargs or {})))
        return func(*args, **(kwargs or {}))


def test_functions_seen_by_a_mode(leaf):
    """The same functions run, with their arguments given in the same way."""

    def scenario(impl):
        layer = leaf.build(impl.nn).eval()
        with _Seen() as seen:
            layer(*leaf.inputs(), **leaf.call)
        return seen.names

    same(scenario)


def test_replaced_functional(monkeypatch, impl):
    """A function that a library has replaced in ``torch.nn.functional`` is the one that runs."""
    layer = impl.nn.Linear(2, 2)
    monkeypatch.setattr(F, "linear", lambda *args: "replaced")

    assert layer(torch.ones(1, 2)) == "replaced"


def test_tensor_subclass(plain):
    """A tensor subclass as input, and as parameter, is seen by its own rules."""

    class Named(torch.Tensor):
        pass

    def scenario(impl):
        layer = plain.build(impl.nn).eval()
        if "weight" in layer._parameters:
            layer.weight = torch.nn.Parameter(layer.weight.detach().as_subclass(Named))
        output = layer(*plain.inputs())
        return type(output).__name__, output.as_subclass(torch.Tensor)

    same(scenario)


def test_meta_and_fake_tensors(leaf):
    """Shapes are found without data."""

    def scenario(impl):
        meta = leaf.build(impl.nn).to("meta")
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            layer = leaf.build(impl.nn).eval()
            fake = layer(*map(mode.from_tensor, leaf.inputs()), **leaf.call)
        calls = {} if leaf.call.get("offsets") is not None else leaf.call
        kept = (
            None
            if "offsets" in leaf.call
            else meta(*(x.to("meta") for x in leaf.inputs()), **calls)
        )
        return tuple(fake.shape), fake.dtype, kept

    same(scenario)


def test_missing_members(plain):
    """A layer of which a parameter was deleted raises torch's error."""

    def scenario(impl, name):
        layer = plain.build(impl.nn)
        delattr(layer, name)
        return layer(*plain.inputs())

    for name in plain.build(torch.nn).state_dict():
        outcome = same(functools.partial(scenario, name=name))

        assert outcome[0] == "returned" or outcome[1] == "AttributeError"


def test_member_replaced_by_none(plain):
    """A parameter set to None is left out, where torch can do without it."""

    def scenario(impl, name):
        layer = plain.build(impl.nn)
        setattr(layer, name, None)
        return layer(*plain.inputs())

    for name in plain.build(torch.nn).state_dict():
        same(functools.partial(scenario, name=name))


def test_attribute_of_the_instance(plain):
    """A tensor in the instance's own dictionary goes before the registered one."""

    def scenario(impl, name):
        layer = plain.build(impl.nn).eval()
        before = layer(*plain.inputs())
        layer.__dict__[name] = getattr(layer, name).detach() + 1
        return before, layer(*plain.inputs())

    for name in plain.build(torch.nn).state_dict():
        outcome = same(functools.partial(scenario, name=name))

        assert name == "num_batches_tracked" or outcome[1][1][0] != outcome[1][1][1]


def test_property_of_a_subclass(plain):
    """A subclass may compute its weight in a property."""

    def scenario(impl):
        base = getattr(impl.nn, plain.layer)

        class Doubled(base):
            @property
            def weight(self):
                return self._parameters["weight"] * 2

        layer = plain.build(impl.nn)
        layer.__class__ = Doubled
        return _both_modes(layer, plain)

    same(scenario)


def test_forward_of_a_subclass(plain):
    """A subclass may extend ``forward``."""

    def scenario(impl):
        base = getattr(impl.nn, plain.layer)

        class Shifted(base):
            def forward(self, *args, **kwargs):
                return super().forward(*args, **kwargs) + 1

        layer = plain.build(impl.nn)
        layer.__class__ = Shifted
        return _both_modes(layer, plain)

    same(scenario)


def test_keyword_names(leaf):
    """The inputs can be given by the names that torch gives them."""

    def scenario(impl):
        layer = leaf.build(impl.nn).eval()
        names = list(inspect.signature(layer.forward).parameters)
        return names, layer(**dict(zip(names, leaf.inputs(), strict=False)), **leaf.call)

    same(scenario)


@pytest.mark.parametrize("name", WEIGHTED)
@pytest.mark.parametrize(
    "change",
    [weight_norm, parametrizations.weight_norm, spectral_norm, parametrizations.spectral_norm],
    ids=["weight_norm", "new_weight_norm", "spectral_norm", "new_spectral_norm"],
)
@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*spectral_norm. is deprecated:FutureWarning")
def test_normed_weight(name, change):
    """A weight that is computed before each call is the one that is used."""
    leaf = LEAVES[name]
    same(lambda impl: _both_modes(change(leaf.build(impl.nn)), leaf))


def test_parametrized_and_restored(plain):
    """A parametrization takes part while it is there."""

    class Double(torch.nn.Module):
        def forward(self, tensor):
            return tensor * 2

    def scenario(impl):
        layer = plain.build(impl.nn)
        parametrize.register_parametrization(layer, "weight", Double())
        with_it = _both_modes(layer, plain)
        parametrize.remove_parametrizations(layer, "weight", leave_parametrized=False)
        return with_it, _both_modes(layer, plain)

    same(scenario)


def test_pruned_and_made_permanent(plain):
    """A pruned weight is used masked, and still when pruning has been made permanent."""

    def scenario(impl):
        layer = plain.build(impl.nn)
        prune.random_unstructured(layer, "weight", amount=1)
        pruned = _both_modes(layer, plain)
        prune.remove(layer, "weight")
        return pruned, _both_modes(layer, plain)

    same(scenario)


def test_functional_call_grad_and_vmap(plain):
    """Replaced parameters and buffers are used, under ``torch.func`` too."""

    def scenario(impl):
        layer = plain.build(impl.nn).eval()
        state = {name: value.detach() + 1 for name, value in layer.state_dict().items()}

        def loss(members):
            return torch.func.functional_call(layer, members, plain.inputs()).sin().sum()

        floats = {name: value for name, value in state.items() if value.is_floating_point()}
        stacked = {name: torch.stack([value, value * 2]) for name, value in floats.items()}
        return loss(state), torch.func.grad(loss)(floats), torch.func.vmap(loss)(stacked)

    same(scenario)


def test_copied_and_saved(plain):
    """Copies compute with their own tensors."""

    def scenario(impl):
        layer = plain.build(impl.nn)
        copied = copy.deepcopy(layer)
        buffer = io.BytesIO()
        torch.save(layer, buffer)
        buffer.seek(0)
        loaded = torch.load(buffer, weights_only=False)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.add_(1)
        return [_both_modes(each, plain) for each in (layer, copied, loaded)]

    same(scenario)


def test_sequential_runs_its_children_in_order():
    """A Sequential runs what is registered in it, also None's error and replaced children."""

    def scenario(impl):
        network = impl.nn.Sequential(impl.nn.Linear(2, 3), impl.nn.ReLU(), impl.nn.Linear(3, 2))
        outputs = [network(torch.ones(1, 2))]
        network[1] = impl.nn.Tanh()
        network.append(impl.nn.Softmax(dim=1))
        outputs.append(network(torch.ones(1, 2)))
        return outputs, impl.nn.Sequential()(torch.ones(2))

    same(scenario)


def test_sequential_with_none():
    """A child that is None cannot be called."""

    def scenario(impl):
        network = impl.nn.Sequential(impl.nn.Linear(2, 2))
        network.register_module("late", None)
        return network(torch.ones(1, 2))

    assert same(scenario)[1] == "TypeError"


def test_sequential_subclass_iterates_its_own_way():
    """A subclass decides with ``__iter__`` what runs."""

    def scenario(impl):
        class Backwards(impl.nn.Sequential):
            def __iter__(self):
                return reversed(list(super().__iter__()))

        return Backwards(impl.nn.Linear(3, 2), impl.nn.Linear(2, 3))(torch.ones(1, 2))

    assert same(scenario)[0] == "returned"


@pytest.mark.parametrize("name", [*PLAIN, "Sequential"])
def test_forward_reads_as_torch(name):
    """Documentation, annotations, signature and source of ``forward`` are torch's."""
    ours = getattr(MODKIT.nn, name).forward
    torchs = getattr(TORCH.nn, name).forward

    assert (ours.__doc__, ours.__annotations__) == (torchs.__doc__, torchs.__annotations__)
    assert inspect.signature(ours) == inspect.signature(torchs)
    assert inspect.getsource(ours) == inspect.getsource(torchs)
