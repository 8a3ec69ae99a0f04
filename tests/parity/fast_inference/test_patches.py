import functools
import itertools
import types
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.cases import for_each
from tests.helpers import MODKIT, TORCH
from tests.parity.fast_inference.layers import FUNCTIONS, input_for
from tests.parity.fast_inference.nets import extra, net, run
from tests.parity.fast_inference.twins import (
    bits,
    called,
    differing_keys,
    holder_of,
    left_behind,
)
from tests.parity.module.module_cases import seed


pytestmark = pytest.mark.usefixtures("clean_hooks")


def recording(function, log, change=None):
    """Wrap a function, so that it records what it is called with."""

    @functools.wraps(function)
    def recorded(*args, **kwargs):
        named = [arg for arg in args if not isinstance(arg, nn.Module)]
        log.append((function.__name__, bits(named), bits(kwargs)))
        result = function(*args, **kwargs)
        return result if change is None else change(result)

    return recorded


def doubled(value):
    """Double the tensors of a result, so that a call that was left out shows."""
    if isinstance(value, tuple):
        return tuple(map(doubled, value))
    return value * 2 if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def in_containers(layer):
    """Put a layer into containers of each kind."""
    return {
        "itself": layer,
        "Sequential": nn.Sequential(nn.Identity(), nn.Sequential(layer), nn.Identity()),
        "attribute, torch": holder_of(TORCH, layer),
        "attribute, modkit": holder_of(MODKIT, layer),
    }


@for_each("name", FUNCTIONS)
def test_patched_function(name):
    """A function of `torch.nn.functional` that is patched, before or inside, is called."""
    make, shape = FUNCTIONS[name]

    def scenario(scope):
        seen, log = {}, []
        patch = mock.patch.object(F, name, recording(getattr(F, name), log, doubled))
        for training in (False, True):
            layer = make().train(training)
            for kind, model in in_containers(layer).items():
                key = training, kind
                with patch, scope(model):
                    seen[key, "before"] = called(model, "no_grad", (input_for(name, shape),), {})
                with scope(model):
                    seen[key, "plain"] = called(model, "no_grad", (input_for(name, shape),), {})
                    with patch:
                        seen[key, "inside"] = called(model, "grad", (input_for(name, shape),), {})
                    seen[key, "undone"] = called(model, "no_grad", (input_for(name, shape),), {})
                patch.start()
                with scope(model):
                    patch.stop()
                    seen[key, "undone inside"] = called(
                        model, "no_grad", (input_for(name, shape),), {}
                    )
        return seen | {"log": log, "was called": len(log) > 0}

    assert differing_keys(scenario) == []


METHODS = {
    "Module.__call__": (nn.Module, "__call__"),
    "Module._call_impl": (nn.Module, "_call_impl"),
    "Module._wrapped_call_impl": (nn.Module, "_wrapped_call_impl"),
    "Linear.__call__": (nn.Linear, "__call__"),
    "Linear._call_impl": (nn.Linear, "_call_impl"),
    "Linear.forward": (nn.Linear, "forward"),
    "ReLU.forward": (nn.ReLU, "forward"),
    "Tanh.forward": (nn.Tanh, "forward"),
    "LayerNorm.forward": (nn.LayerNorm, "forward"),
    "BatchNorm1d.forward": (nn.BatchNorm1d, "forward"),
    "BatchNorm1d._check_input_dim": (nn.BatchNorm1d, "_check_input_dim"),
    "Dropout.forward": (nn.Dropout, "forward"),
    "Sequential.__call__": (nn.Sequential, "__call__"),
    "Sequential._call_impl": (nn.Sequential, "_call_impl"),
    "Sequential.forward": (nn.Sequential, "forward"),
    "Sequential.__iter__": (nn.Sequential, "__iter__"),
    "ModuleList.__iter__": (nn.ModuleList, "__iter__"),
    "ModuleDict.__getitem__": (nn.ModuleDict, "__getitem__"),
    "base of BatchNorm1d.forward": (nn.modules.batchnorm._BatchNorm, "forward"),
}


def patched_class(scope, impl, owner, name):
    """Patch a method before a scope, inside it and around it, and record its calls."""
    model, log, seen = net(impl), [], {}
    original = getattr(owner, name)

    def method(self, *args, **kwargs):
        log.append((type(self).__name__, bits(args), bits(kwargs)))
        return original(self, *args, **kwargs)

    patch = mock.patch.object(owner, name, method)
    with patch, scope(model):
        seen["before"] = run(model)
    with scope(model):
        seen["plain"] = run(model)
        with patch:
            seen["inside"] = run(model), run(model, "inference_mode")
        seen["undone"] = run(model)
    single = nn.Sequential(extra(4))
    with scope(single), patch:
        seen["one layer"] = run(single)
    patch.start()
    try:
        with scope(model):
            seen["still"] = run(model)
            patch.stop()
            seen["undone inside"] = run(model)
    finally:
        patch.stop()
    seen["members"] = left_behind(model)
    return seen | {"log": log, "was called": len(log) > 0}


@for_each(("owner", "name"), METHODS.values(), ids=METHODS.keys())
def test_patched_class(impl, owner, name):
    """A method that is patched on a class of torch, before or inside, is called as often."""
    found = differing_keys(lambda scope: patched_class(scope, impl, owner, name))

    assert found == []


@for_each("name", ["__getattr__", "__getattribute__"])
@for_each("owner", [nn.Module, nn.Linear, nn.Sequential], ids=["Module", "Linear", "Sequential"])
def test_patched_attribute_access(impl, owner, name):
    """Reading a member goes through a `__getattr__` that was patched before, whose result counts."""

    def scenario(scope):
        model, seen = net(impl), {}
        original = getattr(owner, name)

        def read(self, key):
            value = original(self, key)
            return value * 2 if key == "weight" else value

        patch = mock.patch.object(owner, name, read)
        with patch, scope(model):
            seen["before"] = run(model, "no_grad")
        with scope(model):
            seen["plain"] = run(model, "no_grad")
        return seen

    assert differing_keys(scenario) == []


def _forward(layer, x):
    return x * 3


TARGETS = ("", "stem.1", "blocks.0", "head.1", "head.1.1")
INSTANCE = {
    "forward": _forward,
    "_call_impl": _forward,
    "_compiled_call_impl": _forward,
    "_slow_forward": _forward,
    "__call__": _forward,
    "_check_input_dim": lambda layer, x: None,
    "_conv_forward": lambda layer, x, weight, bias: F.conv2d(x, weight * 2, bias),
}


@for_each("name", INSTANCE)
def test_instance_method(impl, name):
    """A method that is set on a module, before or inside, has the same effect."""

    def scenario(scope):
        seen = {}
        for target, time in itertools.product(TARGETS, ("before", "inside")):
            model = net(impl)
            module = model.get_submodule(target)
            method = types.MethodType(INSTANCE[name], module)
            if time == "before":
                setattr(module, name, method)
            with scope(model):
                seen[target, time, "first"] = run(model, "no_grad")
                setattr(module, name, method)
                seen[target, time, "set"] = run(model)
                delattr(module, name)
                seen[target, time, "deleted"] = run(model)
                if name == "_compiled_call_impl":
                    module._compiled_call_impl = None
                    seen[target, time, "None"] = run(model)
                setattr(module, name, method)
            seen[target, time, "after"] = run(model)
            seen[target, time, "members"] = left_behind(model)
        return seen

    assert differing_keys(scenario) == []


def callers(impl):
    """Return layers of users' classes that override how a module is called."""

    class Forward(nn.Linear, impl.nn.Module):
        def forward(self, x):
            return super().forward(x) + 1

    class CallImpl(nn.Linear):
        def _call_impl(self, x):
            return super()._call_impl(x) * 2

    class Call(nn.Linear):
        def __call__(self, x):
            return super().__call__(x) * 2

    class Slots(nn.Tanh):
        __slots__ = ("own",)

    class Iterates(nn.Sequential, impl.nn.Module):
        def __iter__(self):
            return reversed(list(self._modules.values()))

    class Runs(nn.Sequential, impl.nn.Module):
        def forward(self, x, times=2):
            for _ in range(times):
                x = super().forward(x)
            return x

    return {
        "forward": (lambda: Forward(6, 5), (3, 6)),
        "_call_impl": (lambda: CallImpl(6, 5), (3, 6)),
        "__call__": (lambda: Call(6, 5), (3, 6)),
        "slots": (Slots, (3, 6)),
        "__iter__": (lambda: Iterates(nn.Linear(6, 6), nn.Tanh()), (3, 6)),
        "forward of a Sequential": (lambda: Runs(nn.Linear(6, 6), nn.Tanh()), (3, 6)),
    }


def readers(impl):
    """Return layers of users' classes that override what torch's layers read."""

    class Weight(nn.Linear, impl.nn.Module):
        def __init__(self, *args):
            super().__init__(*args)
            self.raw = self._parameters.pop("weight")

        @property
        def weight(self):
            if "raw" not in self._parameters:
                raise AttributeError("weight")
            return self.raw * 2

    class Eps(nn.LayerNorm):
        @property
        def eps(self):
            return 0.5

        @eps.setter
        def eps(self, value):
            pass

    class ConvForward(nn.Conv2d):
        def _conv_forward(self, x, weight, bias):
            return super()._conv_forward(x, weight * 2, bias)

    class Check(nn.BatchNorm2d):
        def _check_input_dim(self, x):
            raise ValueError("own check")

    class GetAttr(nn.Linear, impl.nn.Module):
        def __getattr__(self, name):
            value = super().__getattr__(name)
            return value * 2 if name == "weight" else value

    class ClassAttribute(nn.LayerNorm):
        eps = 0.25

        def __init__(self, width):
            super().__init__(width)
            del self.__dict__["eps"]

    return {
        "property weight": (lambda: Weight(6, 5), (3, 6)),
        "property eps": (lambda: Eps(6), (3, 6)),
        "_conv_forward": (lambda: ConvForward(4, 3, 2), (2, 4, 6, 6)),
        "_check_input_dim": (lambda: Check(4), (2, 4, 6, 6)),
        "__getattr__": (lambda: GetAttr(6, 5), (3, 6)),
        "class attribute": (lambda: ClassAttribute(6), (3, 6)),
    }


def test_subclasses(impl):
    """Overrides in a user's subclass of a layer are called inside."""

    def scenario(scope):
        seen = {}
        for name, (make, shape) in (callers(impl) | readers(impl)).items():
            seed()
            layer = make()
            with torch.no_grad():
                for parameter in layer.parameters():
                    parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter))
            for kind, model in in_containers(layer).items():
                with scope(model):
                    for mode in ("inference_mode", "grad"):
                        seen[name, kind, mode] = called(model, mode, (input_for("", shape),), {})
                seen[name, kind] = left_behind(model)
        return seen

    assert differing_keys(scenario) == []
