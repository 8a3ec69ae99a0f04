import copy
import warnings

import pytest
import torch
from torch import nn

from tests.cases import for_each
from tests.helpers import MODKIT, TORCH
from tests.parity.fast_inference.twins import (
    bits,
    called,
    differing_keys,
    fresh,
    left_behind,
    outcome,
)
from tests.parity.module.module_cases import Sample, common_modules, module_db, seed


every_info = for_each("info", module_db, ids=lambda info: info.name)


def samples(info, dtype, most):
    """Yield some cases of an entry, spread over all that it has: label, sample, mode.

    Some entries have hundreds of cases.
    """
    for training in (False, True) if info.train_and_eval_differ else (False,):
        seed()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            inputs = list(
                info.module_inputs_func(
                    info, device="cpu", dtype=dtype, requires_grad=True, training=training
                )
            )
        step = max(1, len(inputs) // most)
        for number, case in enumerate(inputs[::step]):
            made, given = case.constructor_input, case.forward_input
            sample = Sample(info.module_cls, made.args, made.kwargs, given.args, given.kwargs)
            yield f"{dtype}, training={training}, case {number * step}", sample, training


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


def first_tensor(change):
    def changed(args, kwargs):
        args = [*args]
        for place, value in enumerate(args):
            if isinstance(value, torch.Tensor):
                args[place] = change(value.detach().clone())
                break
        return tuple(args), kwargs

    return changed


# Inputs that most layers refuse, and some take otherwise than others.
ODD_INPUTS = {
    "none": lambda args, kwargs: ((), {}),
    "one more": lambda args, kwargs: ((*args, 3), kwargs),
    "five more": lambda args, kwargs: ((*args, *range(5)), kwargs),
    "unknown keyword": lambda args, kwargs: (args, {**kwargs, "unknown": 1}),
    "first by keyword": lambda args, kwargs: (
        args[1:],
        {**kwargs, **dict(zip(["input"], args, strict=False))},
    ),
    "first by another keyword": lambda args, kwargs: (
        args[1:],
        {**kwargs, **dict(zip(["x"], args, strict=False))},
    ),
    "text": lambda args, kwargs: (("text", *args[1:]), kwargs),
    "None": lambda args, kwargs: ((None, *args[1:]), kwargs),
    "list": lambda args, kwargs: (([1.0, 2.0], *args[1:]), kwargs),
    "number": lambda args, kwargs: ((1.5, *args[1:]), kwargs),
    "double": first_tensor(torch.Tensor.double),
    "integers": first_tensor(torch.Tensor.long),
    "complex": first_tensor(lambda value: value + 0j),
    "bool": first_tensor(torch.Tensor.bool),
    "meta": first_tensor(lambda value: value.to("meta")),
    "scalar": first_tensor(lambda value: value.flatten()[0]),
    "vector": first_tensor(torch.Tensor.flatten),
    "empty": first_tensor(lambda value: value[:0] if value.ndim else value),
    "more dimensions": first_tensor(lambda value: value[None]),
    "seven dimensions": first_tensor(lambda value: value[(None,) * max(0, 7 - value.ndim)]),
    "too narrow": first_tensor(lambda value: value[..., :-1] if value.ndim else value),
    "strided": first_tensor(lambda value: value.mT if value.ndim > 1 else value),
    "expanded": first_tensor(lambda value: value[:1].expand(value.shape) if value.ndim else value),
    "parameter": first_tensor(
        lambda value: nn.Parameter(value) if value.is_floating_point() else value
    ),
    "sparse": first_tensor(torch.Tensor.to_sparse),
}


def odd_calls(sample, training, scope):
    """Call a layer, and a Sequential that has it, with each of the odd inputs."""
    layer = built(sample, torch.float32, training)
    models = {"itself": layer, "in a Sequential": nn.Sequential(nn.Identity(), layer)}
    seen = {}
    for odd, change in ODD_INPUTS.items():
        if odd == "meta" and sample.layer is nn.Embedding:
            # Torch returns uninitialized memory.
            continue
        for name, model in models.items():
            args, kwargs = change(sample.inputs, sample.input_kwargs)
            seed()
            with scope(model), torch.no_grad():
                seen[odd, name] = outcome(lambda: model(*fresh(args), **fresh(kwargs)))
    return seen


@pytest.mark.slow
@every_info
def test_odd_inputs(info):
    """A wrong call raises the same type and text inside, and an odd one gives the same results."""
    _label, sample, training = next(samples(info, torch.float32, most=1))
    differing = differing_keys(lambda scope: odd_calls(sample, training, scope))

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
