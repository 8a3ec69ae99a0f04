import pickle

import pytest
import torch

from tests.helpers import MODKIT


class Doubles(MODKIT.jit.ScriptModule):
    """A class-based module that pickle finds by its name."""

    def __init__(self, size: int):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((size,), 2.0))

    @MODKIT.jit.script_method
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply."""
        return x * self.weight


class Holder(MODKIT.jit.ScriptModule):
    """A class-based module with another one in it."""

    def __init__(self):
        super().__init__()
        self.part = Doubles(3)

    @MODKIT.jit.script_method
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Pass on."""
        return self.part(x)


def test_a_pickled_class_based_module_keeps_its_class():
    """What comes back is of the users' classes, with what was in Python, and computes the same."""
    module = Holder()
    module.part.note = "text"
    holder = pickle.loads(pickle.dumps(module))
    loaded = holder.part

    assert type(holder) is Holder
    assert type(loaded) is Doubles
    assert loaded.note == "text"
    assert torch.equal(holder(torch.ones(3)), torch.full((3,), 2.0))
    assert torch.equal(loaded(torch.ones(3)), torch.full((3,), 2.0))
    assert isinstance(loaded.weight, torch.nn.Parameter)


def test_hooks_and_shared_layers_are_pickled():
    """What is one stays one, Python hooks come along, and buffers beside the state stay there."""
    layer = MODKIT.nn.Linear(2, 2)
    layer.register_buffer("cache", torch.ones(2), persistent=False)
    module = MODKIT.jit.script(MODKIT.nn.Sequential(layer, MODKIT.nn.ReLU(), layer))
    module[1].register_forward_hook(print)
    loaded = pickle.loads(pickle.dumps(module))

    assert loaded[0] is loaded[2]
    assert list(loaded[1]._forward_hooks.values()) == [print]
    assert list(loaded.state_dict()) == list(module.state_dict())
    assert "0.cache" not in loaded.state_dict()


def test_a_hook_that_pickle_cannot_take_is_an_error():
    """As for any module, a function that has no name cannot be pickled."""
    module = MODKIT.jit.script(MODKIT.nn.Linear(2, 2))
    module.register_forward_hook(lambda *_: None)

    with pytest.raises((pickle.PicklingError, AttributeError), match="lambda"):
        pickle.dumps(module)
