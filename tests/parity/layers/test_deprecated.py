import warnings

import pytest

from tests.helpers import MODKIT, TORCH
from tests.parity.layers.samples import torch_names


def _warned(action):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        action()
    return [(w.category, torch_names(w.message), w.filename) for w in caught]


ACTIONS = {
    "container": lambda nn: nn.Container(),
    "container_with_children": lambda nn: nn.Container(a=nn.ReLU()),
    "subclass_of_container": lambda nn: type("Own", (nn.Container,), {}),
    "instance_of_subclass": lambda nn: type("Own", (nn.Container,), {})(),
    "loss": lambda nn: nn.NLLLoss2d(),
    "subclass_of_loss": lambda nn: type("Own", (nn.NLLLoss2d,), {})(),
    "internal_mixin": lambda nn: nn.modules.conv._ConvTransposeMixin(
        1, 1, (1,), (1,), (0,), (1,), True, (0,), 1, True, "zeros"
    ),
    "loss_arguments": lambda nn: nn.L1Loss(size_average=False),
    "hardtanh_arguments": lambda nn: nn.Hardtanh(min_value=-2, max_value=2),
    "nothing": lambda nn: nn.Linear(1, 1),
}


@pytest.mark.parametrize("action", ACTIONS)
def test_warns_as_torch(action):
    """Deprecated classes and arguments warn as often, of the same, and at the same place."""
    seen = {impl: _warned(lambda: ACTIONS[action](impl.nn)) for impl in (TORCH, MODKIT)}

    assert seen[MODKIT] == seen[TORCH]


@pytest.mark.parametrize("name", ["Container", "NLLLoss2d"])
def test_deprecated_class_warns_once(impl, name):
    """A deprecated class warns once when built, and once when subclassed."""
    deprecated = getattr(impl.nn, name)

    with pytest.warns(FutureWarning, match=f"`(nn.)?{name}` .* deprecated") as built:
        deprecated()
    with pytest.warns(FutureWarning, match=f"`(nn.)?{name}` .* deprecated") as subclassed:
        type("Own", (deprecated,), {})

    assert (len(built), len(subclassed)) == (1, 1)
    assert deprecated.__deprecated__ == getattr(TORCH.nn, name).__deprecated__


@pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")
def test_container_holds_its_arguments(impl):
    """A Container registers its keyword arguments as children."""
    made = impl.nn.Container(a=impl.nn.ReLU(), b=impl.nn.Linear(1, 1))

    assert [name for name, _ in made.named_children()] == ["a", "b"]
    assert isinstance(made, impl.nn.Module)
