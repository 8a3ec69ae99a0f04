import copy
import warnings

import pytest
import torch

from tests.cases import for_each
from tests.helpers import MODKIT, TORCH
from tests.parity.fast_inference.twins import (
    bits,
    called,
    differing_keys,
    left_behind,
    outcome,
)
from tests.parity.module.module_cases import cases, common_modules, fresh, module_db, seed


every_info = for_each("info", module_db, ids=lambda info: info.name)


def samples(info, dtype, most):
    """Yield some cases of an entry, which may have hundreds: label, sample, mode."""
    for training in (True, False):
        found = [case for case in cases(info, [dtype]) if case[-1] == training]
        for label, sample, *_ in found[:: max(1, len(found) // most)]:
            yield label, sample, training


def built(sample, dtype, training):
    """Build a layer of torch's own class."""
    args, kwargs = copy.deepcopy((sample.args, sample.kwargs))
    seed()
    with warnings.catch_warnings():
        # Some constructors advise on performance.
        warnings.simplefilter("ignore")
        return sample.layer(*args, **kwargs).to(dtype).train(training)


def calls(model, sample, mode, scope):
    """Call a model twice in a scope and once after it; return all that can be seen."""
    seen = {}
    with scope(model):
        for time in ("first", "second"):
            seen[time] = called(model, mode, sample.inputs, sample.input_kwargs)
            seen[f"state after the {time}"] = [bits(buffer) for buffer in model.buffers()]
            seen[f"gradients of the {time}"] = [bits(p.grad) for p in model.parameters()]
    seen["after"] = called(model, mode, sample.inputs, sample.input_kwargs)
    seen["members"] = left_behind(model)
    return seen


@every_info
@pytest.mark.parametrize("most", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_each_case(info, most):
    """A layer gives the same results, gradients, buffers, random numbers and errors inside."""
    differing = []
    plans = (
        (torch.float32, most, ("inference_mode", "grad")),
        (torch.float64, 1, ("no_grad",)),
    )
    for dtype, most, modes in plans:
        for label, sample, training in samples(info, dtype, most):
            for mode in modes:
                found = differing_keys(
                    lambda scope: calls(built(sample, dtype, training), sample, mode, scope)
                )
                differing += [(label, mode, key) for key in found]

    assert differing == []


@every_info
def test_user_class_of_the_layer(info):
    """A user's class derived from a layer gives the same results inside."""
    differing = []
    for label, sample, training in samples(info, torch.float32, most=1):
        for impl in (TORCH, MODKIT):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                layers = {name: sample.build(impl).train(training) for name in ("plain", "fast")}
            found = differing_keys(
                lambda scope: calls(layers.pop(scope.__name__), sample, "grad", scope)
            )
            differing += [(label, impl.name, key) for key in found]

    assert differing == []


def with_error_inputs():
    """Return the entries that have wrong inputs."""
    return [info for info in module_db() if info.module_error_inputs_func is not None]


@for_each("info", with_error_inputs, ids=lambda info: info.name)
def test_error_inputs(info):
    """Torch's table of wrong inputs raises the same type and text inside."""
    differing, raised = [], 0
    for training in (False, True):
        errors = info.module_error_inputs_func(
            info, device="cpu", dtype=torch.float32, requires_grad=True, training=training
        )
        for number, error in enumerate(errors):
            if error.error_on is common_modules().ModuleErrorEnum.CONSTRUCTION_ERROR:
                continue
            made = error.module_error_input.constructor_input
            given = error.module_error_input.forward_input

            def call(scope, made=made, given=given, training=training):
                seed()
                layer = info.module_cls(*made.args, **made.kwargs).train(training)
                with scope(layer):
                    return {
                        "outcome": outcome(lambda: layer(*fresh(given.args), **fresh(given.kwargs)))
                    }

            raised += 1
            differing += [(training, number, key) for key in differing_keys(call)]

    if not raised:
        pytest.skip("torch's table has only inputs that the constructor refuses")

    assert differing == []
