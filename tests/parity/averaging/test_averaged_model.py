"""``AveragedModel``: construction, calls, copies and conversions."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import modkit.nn
import modkit.optim.swa_utils
from tests.cases import for_each
from tests.helpers import Implementation, freeze, same
from tests.models import normed_net, one_weight, set_weight, tensors
from tests.parity.averaging.rules import (
    SUBJECTS,
    averaged_of,
    build,
    every_subject,
    states_after_updates,
    training_states,
)


def test_averaged_model_is_a_module_of_both_libraries() -> None:
    """Code that looks for torch's class or for either Module finds modkit's averaged model."""
    averaged = modkit.optim.swa_utils.AveragedModel(torch.nn.Linear(1, 1))

    assert isinstance(averaged, torch.optim.swa_utils.AveragedModel)
    assert isinstance(averaged, modkit.nn.Module)
    assert isinstance(averaged, torch.nn.Module)


def test_averaged_model_is_generic_at_run_time() -> None:
    """A subscripted class builds a model as the plain class does."""
    averaged = modkit.optim.swa_utils.AveragedModel[torch.nn.Linear](torch.nn.Linear(1, 1))

    assert type(averaged) is modkit.optim.swa_utils.AveragedModel
    assert copy.deepcopy(averaged).module.weight == averaged.module.weight


def _two_names_of_one_memory(model: torch.nn.Module) -> None:
    memory = torch.arange(3.0)
    model.register_buffer("first", memory)
    model.register_buffer("second", memory.view(3))


def _buffer_of_a_parameter(model: torch.nn.Module) -> None:
    model.large = torch.nn.Parameter(torch.randn(50, 50))
    model.register_buffer("alias", model.large.detach())


def _attribute_of_a_buffer(model: torch.nn.Module) -> None:
    model.register_buffer("tagged", torch.ones(2))
    model.tagged.tag = ["kept"]


def _gradient_of_a_buffer(model: torch.nn.Module) -> None:
    model.register_buffer("measured", torch.ones(2))
    model.measured.grad = torch.ones(2)


def _strides(model: torch.nn.Module) -> None:
    model.register_buffer("transposed", torch.randn(2, 3).t())
    model.register_buffer("part", torch.randn(6)[2:4])
    model.register_buffer("expanded", torch.randn(1).expand(3))
    model.register_buffer("empty", torch.zeros(0))


@for_each(
    "change",
    [
        _two_names_of_one_memory,
        _buffer_of_a_parameter,
        _attribute_of_a_buffer,
        _gradient_of_a_buffer,
        _strides,
    ],
)
def test_buffers_are_copied_as_deepcopy_does(change) -> None:
    """Buffers keep their strides, attributes, gradients, and what they share memory with."""

    def scenario(impl: Implementation):
        torch.manual_seed(0)
        model = normed_net(impl)
        change(model)
        copied = impl.AveragedModel(model).module
        tensors = {**dict(copied.named_buffers()), **dict(copied.named_parameters())}
        pointers = [tensor.data_ptr() for tensor in tensors.values() if tensor.numel()]
        facts = {
            name: (tensor.stride(), tensor.untyped_storage().nbytes(), vars(tensor), tensor.grad)
            for name, tensor in copied.named_buffers()
        }
        return tensors, facts, len(pointers) - len(set(pointers))

    assert same(scenario)[0] == "returned"


def shown(impl: Implementation) -> Any:
    """Print an averaged model, walk through it, and read its arguments and its count."""
    averaged = impl.AveragedModel(normed_net(impl))
    chosen = impl.AveragedModel(one_weight(impl), None, len, use_buffers=True)
    lists = impl.AveragedModel(one_weight(impl), multi_avg_fn=max)
    names = "avg_fn", "multi_avg_fn", "use_buffers"
    arguments = [[getattr(m, name) for name in names] for m in (averaged, chosen, lists)]
    modules = [name for name, _ in averaged.named_modules()]
    return repr(averaged), modules, arguments, dict(averaged.named_buffers())


def placed(impl: Implementation) -> Any:
    """Make the average on a device; the model and the default device are elsewhere."""
    devices = []
    for device in "cpu", "meta", torch.device("meta"), torch.device("cpu", 0):
        model = normed_net(impl)
        averaged = impl.AveragedModel(model, device=device)
        devices.append([tensor.device for m in (averaged, model) for tensor in tensors(m)])
    on_meta = impl.AveragedModel(normed_net(impl).to("meta"))
    return devices, [tensor.device for tensor in tensors(on_meta)]


def updated_elsewhere(impl: Implementation) -> Any:
    """Update while the default device is another one."""
    averages = []
    for device in "cpu", None:
        model = build(impl, "layer")
        averaged = impl.AveragedModel(model, device)
        with torch.device("meta"):
            averaged.update_parameters(model)
            averaged.update_parameters(model)
        averages.append(averaged)
    return averages


def copied_flags(impl: Implementation) -> Any:
    """The copy has the model's modes, flags and hooks; making it changes nothing of the model."""
    calls: list[str] = []
    model = normed_net(impl).eval()
    model[0].weight.requires_grad_(False)
    model[2].register_forward_hook(lambda *_: calls.append("hook"))
    averaged = impl.AveragedModel(model)
    averaged(torch.ones(2, 3))
    modes = [[module.training for module in m.modules()] for m in (averaged, model)]
    flags = [[p.requires_grad for p in m.parameters()] for m in (averaged, model)]
    return modes, flags, calls, model


def called(impl: Implementation) -> Any:
    """Arguments reach the copy, its result comes back, and hooks of the average run."""

    class Echo(impl.nn.Module):
        def forward(self, *args, **kwargs):
            return args, kwargs

    averaged = impl.AveragedModel(one_weight(impl, 3.0))
    averaged.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    averaged.register_forward_hook(lambda module, args, output: output * 10)
    return impl.AveragedModel(Echo())(1, 2, three=4), averaged(torch.ones(1, 1))


def differentiated(impl: Implementation) -> Any:
    """A backward pass leaves gradients in the copy alone; zero_grad and flags reach it."""
    model = one_weight(impl, 2.0)
    averaged = impl.AveragedModel(model)
    averaged(torch.ones(1, 1)).backward()
    gradients = averaged.module.weight.grad.clone(), model.weight.grad
    averaged.zero_grad()
    averaged.eval().requires_grad_(False)
    flags = [p.requires_grad for p in averaged.parameters()]
    return gradients, averaged.module.weight.grad, flags, averaged.module.training


def subclassed(impl: Implementation) -> Any:
    """A subclass with further attributes calls the initialization of its base."""

    class Named(impl.AveragedModel):
        def __init__(self, model, name: str) -> None:
            super().__init__(model, use_buffers=True)
            self.name = name

        def forward(self, x):
            return self.name, super().forward(x)

    averaged = Named(one_weight(impl, 5.0), "swa")
    return averaged(torch.ones(1, 1)), averaged.use_buffers


def replaced(impl: Implementation) -> Any:
    """If `module` is replaced by `set_submodule`, updates go on in the new copy."""
    averages = []
    for subject in SUBJECTS:
        model, averaged = averaged_of(impl, subject, 3)
        averaged.set_submodule("module", set_weight(build(impl, subject), 1.0))
        list(training_states(model, 1))
        averaged.update_parameters(model)
        averages.append(averaged)
    return averages


def set_up_by_hand(averaged: Any, model: torch.nn.Module, impl: Implementation) -> None:
    """Set the attributes of an averaged model, as subclasses do that avoid its initialization."""
    averaged.module = copy.deepcopy(model)
    averaged.register_buffer("n_averaged", torch.tensor(0))
    averaged.avg_fn = None
    averaged.multi_avg_fn = impl.get_ema_multi_avg_fn(0.5)
    averaged.use_buffers = True


def not_initialized(impl: Implementation) -> Any:
    """Subclasses may pass the initialization by, and set the attributes by themselves."""

    class Own(impl.AveragedModel):
        def __init__(self, model):
            super(impl.AveragedModel, self).__init__()
            set_up_by_hand(self, model, impl)

    states = []
    for make in (Own, lambda _: impl.AveragedModel.__new__(impl.AveragedModel)):
        model = one_weight(impl)
        averaged = make(model)
        if not isinstance(averaged, Own):
            torch.nn.Module.__init__(averaged)
            set_up_by_hand(averaged, model, impl)
        states += states_after_updates(averaged, model, 3)
        states += states_after_updates(copy.deepcopy(averaged), model, 3)
    return states


def without_a_model(impl: Implementation) -> Any:
    """The model may be assigned later."""
    averaged = impl.AveragedModel(None)
    averaged.module = one_weight(impl)
    return states_after_updates(averaged, one_weight(impl), 3)


SCENARIOS = [
    shown,
    not_initialized,
    without_a_model,
    placed,
    updated_elsewhere,
    copied_flags,
    called,
    differentiated,
    subclassed,
    replaced,
]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_outcomes_are_those_of_torch(scenario: Callable[[Implementation], Any]) -> None:
    """An averaged model returns and holds the same as torch's."""
    assert same(scenario)[0] == "returned"


REFUSED: dict[str, Callable[[Implementation], Any]] = {
    "two functions": lambda impl: impl.AveragedModel(one_weight(impl), None, len, len),
    "parameters in place of a model": lambda impl: impl.AveragedModel(
        one_weight(impl).parameters()
    ),
    "a function as device": lambda impl: impl.AveragedModel(one_weight(impl), len),
    **{
        f"device {device!r}": lambda impl, device=device: impl.AveragedModel(
            one_weight(impl), device
        )
        for device in ("nowhere", "", 1.5, [])
    },
}


@pytest.mark.parametrize("scenario", REFUSED.values(), ids=REFUSED)
def test_errors_are_those_of_torch(scenario: Callable[[Implementation], Any]) -> None:
    """Arguments that torch refuses raise the same exception."""
    assert same(scenario)[0] == "raised"


CASTS = {
    "float": torch.float32,
    "double": torch.float64,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
}


every_cast = for_each("method", CASTS)


@every_subject
@every_cast
@for_each("together", [False, True])
def test_a_cast_average_goes_on(subject: str, method: str, together: bool) -> None:
    """The average is cast, with its model or alone, and averaged further with torch's bits."""

    def scenario(impl: Implementation) -> object:
        model, averaged = averaged_of(impl, subject)
        getattr(averaged, method)()
        if together:
            getattr(model, method)()
        for _ in training_states(model, 2):
            averaged.update_parameters(model)
        return averaged, list(tensors(averaged))

    assert same(scenario)[0] == "returned"


@every_subject
def test_an_average_on_meta_is_filled_by_to_empty_and_a_load(
    impl: Implementation, subject: str
) -> None:
    """A checkpoint is loaded into an average that was made without data, which then goes on."""
    model, averaged = averaged_of(impl, subject)
    empty = impl.AveragedModel(copy.deepcopy(model), "meta").to_empty(device="cpu")
    empty.load_state_dict(averaged.state_dict())
    for _ in training_states(model, 2):
        averaged.update_parameters(model)
        empty.update_parameters(model)

    assert freeze(empty) == freeze(averaged)
    assert empty.n_averaged == 4
