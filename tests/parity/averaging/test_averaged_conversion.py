import copy

import pytest
import torch

from tests.cases import for_each
from tests.helpers import Implementation, freeze, same
from tests.models import normed_net, tensors
from tests.parity.averaging.rules import averaged_of, every_subject, training_states


CASTS = {
    "float": torch.float32,
    "double": torch.float64,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
}


every_cast = for_each("method", CASTS)


@every_subject
@every_cast
def test_a_cast_average_goes_on(subject: str, method: str) -> None:
    """Average and model cast alike are averaged further, with torch's bits."""

    def scenario(impl: Implementation) -> object:
        model, averaged = averaged_of(impl, subject)
        getattr(averaged, method)()
        getattr(model, method)()
        for _ in training_states(model, 2):
            averaged.update_parameters(model)
        return averaged, list(tensors(averaged))

    assert same(scenario)[0] == "returned"


@every_subject
@every_cast
def test_a_wider_or_narrower_average_goes_on(subject: str, method: str) -> None:
    """Only the average is cast: the default rule averages in its dtype, with torch's bits."""

    def scenario(impl: Implementation) -> object:
        model, averaged = averaged_of(impl, subject)
        getattr(averaged, method)()
        for _ in training_states(model, 2):
            averaged.update_parameters(model)
        return averaged, list(tensors(averaged))

    assert same(scenario)[0] == "returned"


@pytest.mark.parametrize("updates", [0, 2])
def test_a_count_that_type_has_cast_goes_on(updates: int) -> None:
    """After `type(torch.float64)` the count is a float64, with which torch averages further."""

    def scenario(impl: Implementation) -> object:
        model, averaged = averaged_of(impl, "layer", updates)
        averaged.type(torch.float64)
        model.double()
        for _ in training_states(model, 3):
            averaged.update_parameters(model)
        return averaged, averaged.n_averaged

    assert same(scenario)[0] == "returned"


FORMS = {
    "device": (("cpu",), {}),
    "device and dtype": (("cpu", torch.float64), {}),
    "dtype": ((torch.float64,), {}),
    "dtype and non_blocking": ((torch.float16, True), {}),
    "keyword device": ((), {"device": "meta"}),
    "keyword dtype": ((), {"dtype": torch.bfloat16, "non_blocking": True}),
    "tensor": ((torch.zeros(1, dtype=torch.float64),), {}),
    "tensor elsewhere": ((torch.zeros(1, dtype=torch.float64, device="meta"),), {}),
    "memory format": ((), {"memory_format": torch.channels_last}),
}


@every_subject
@pytest.mark.parametrize("form", FORMS)
def test_forms_of_to(subject: str, form: str) -> None:
    """Each documented form of `to` returns self and gives torch's tensors; the count stays int64."""
    args, kwargs = FORMS[form]

    def scenario(impl: Implementation) -> object:
        averaged = averaged_of(impl, subject)[1]
        moved = averaged.to(*args, **kwargs)
        return moved is averaged, str(averaged.n_averaged.dtype), list(tensors(averaged))

    kind, value = same(scenario)

    assert kind == "returned"
    assert value[1][:2] == [("bool", "True"), ("str", "'torch.int64'")]


def test_complex_example_of_to(impl: Implementation) -> None:
    """The example with torch.cdouble: the average is complex, computes and is averaged."""
    model = impl.nn.Linear(2, 2, bias=None)
    with pytest.warns(UserWarning, match="Complex modules"):
        model.to(torch.cdouble)
    averaged = impl.AveragedModel(model)
    first = model.weight.detach().clone()
    averaged.update_parameters(model)
    with torch.no_grad():
        model.weight.add_(2 + 4j)
    averaged.update_parameters(model)
    output = averaged(torch.ones(3, 2, dtype=torch.cdouble))

    torch.testing.assert_close(averaged.module.weight.detach(), first + (1 + 2j))
    assert output.dtype == torch.complex128
    assert output.shape == (3, 2)


def test_channels_last_reaches_the_copy(impl: Implementation) -> None:
    """4D parameters of the copy get the memory format, and updates keep it."""
    model = impl.nn.Conv2d(3, 4, 3)
    averaged = impl.AveragedModel(model).to(memory_format=torch.channels_last)
    for _ in training_states(model, 3):
        averaged.update_parameters(model)

    assert averaged.module.weight.is_contiguous(memory_format=torch.channels_last)
    assert model.weight.is_contiguous()
    assert averaged(torch.ones(1, 3, 4, 4)).shape == (1, 4, 2, 2)


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


@every_subject
def test_share_memory(impl: Implementation, subject: str) -> None:
    """All parameters and buffers move to shared memory; self is returned, and updates stay there."""
    model, averaged = averaged_of(impl, subject)

    assert averaged.share_memory() is averaged

    averaged.update_parameters(model)

    assert all(t.is_shared() for t in tensors(averaged))
    assert not any(p.is_shared() for p in model.parameters())


ACCELERATORS = for_each("method", ["cuda", "ipu", "mtia", "xpu"])


@ACCELERATORS
@pytest.mark.parametrize("device", [None, 1])
def test_a_device_gets_all_parameters_and_buffers(
    impl: Implementation, method: str, device: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The meta device stands for it: every tensor is moved to the given one, the count included."""
    asked = []

    def move(tensor, device=None):
        asked.append(device)
        return tensor.to("meta")

    monkeypatch.setattr(torch.Tensor, method, move, raising=False)
    _, averaged = averaged_of(impl, "sequential")
    count = len(list(tensors(averaged)))

    assert getattr(averaged, method)(*([] if device is None else [device])) is averaged
    assert asked == [device] * count
    assert {t.device.type for t in tensors(averaged)} == {"meta"}


@pytest.mark.parametrize("swap", [False, True])
@every_cast
def test_conversions_with_swapped_parameters(impl: Implementation, method: str, swap: bool) -> None:
    """With and without swap_module_params_on_conversion, Parameter objects and averages stay."""
    model = normed_net(impl)
    averaged = impl.AveragedModel(model)
    averaged.update_parameters(model)
    objects = [id(p) for p in averaged.parameters()]
    torch.__future__.set_swap_module_params_on_conversion(swap)
    try:
        getattr(averaged, method)()
        getattr(model, method)()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    halves = [p.detach() / 2 for p in averaged.parameters()]
    averaged.update_parameters(model)

    assert [id(p) for p in averaged.parameters()] == objects
    assert averaged.n_averaged == 2
    for own, expected in zip(averaged.parameters(), halves, strict=True):
        torch.testing.assert_close(own.detach(), expected)
