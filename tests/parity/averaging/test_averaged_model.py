import copy

import pytest
import torch

import modkit.nn
import modkit.optim.swa_utils
from tests.cases import for_each
from tests.helpers import Implementation, freeze, same
from tests.models import normed_net, one_weight
from tests.parity.averaging.rules import RULES, averaged_of, build, every_subject, training_states


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


def test_module_is_an_independent_copy(impl: Implementation) -> None:
    """The averaged copy has the model's class and values, and shares no tensor with it."""
    model = normed_net(impl)
    averaged = impl.AveragedModel(model)
    own = [tensor.data_ptr() for tensor in averaged.module.state_dict().values()]

    assert averaged.module is not model
    assert freeze(averaged.module) == freeze(model)
    assert set(own).isdisjoint(tensor.data_ptr() for tensor in model.state_dict().values())


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


def _strides(model: torch.nn.Module) -> None:
    model.register_buffer("transposed", torch.randn(2, 3).t())
    model.register_buffer("part", torch.randn(6)[2:4])
    model.register_buffer("expanded", torch.randn(1).expand(3))
    model.register_buffer("empty", torch.zeros(0))


@for_each(
    "change",
    [_two_names_of_one_memory, _buffer_of_a_parameter, _attribute_of_a_buffer, _strides],
)
def test_buffers_are_copied_as_deepcopy_does(change) -> None:
    """Buffers keep their strides and attributes, and share memory with each other as they did."""

    def scenario(impl: Implementation):
        torch.manual_seed(0)
        model = normed_net(impl)
        change(model)
        copied = impl.AveragedModel(model).module
        tensors = {**dict(copied.named_buffers()), **dict(copied.named_parameters())}
        pointers = [tensor.data_ptr() for tensor in tensors.values() if tensor.numel()]
        facts = {
            name: (tensor.stride(), tensor.untyped_storage().nbytes(), vars(tensor))
            for name, tensor in copied.named_buffers()
        }
        return tensors, facts, len(pointers) - len(set(pointers))

    assert same(scenario)[0] == "returned"


def test_construction_leaves_the_model_alone(impl: Implementation) -> None:
    """Averaging a model changes neither its values nor its mode nor its flags."""
    model = normed_net(impl).eval()
    model[0].requires_grad_(False)
    before = freeze(model)
    impl.AveragedModel(model, device="meta")

    assert freeze(model) == before
    assert not any(module.training for module in model.modules())


def test_counter_is_a_zero_of_type_long(impl: Implementation) -> None:
    """The buffer n_averaged starts as a 0-dimensional int64 zero, and is saved."""
    averaged = impl.AveragedModel(one_weight(impl))
    counter = averaged.n_averaged

    assert (counter.dtype, counter.shape, counter.item()) == (torch.int64, (), 0)
    assert dict(averaged.named_buffers())["n_averaged"] is counter
    assert "n_averaged" in averaged.state_dict()


def test_arguments_are_attributes() -> None:
    """The averaging functions and use_buffers can be read from the averaged model."""

    def scenario(impl: Implementation):
        averaged = impl.AveragedModel(one_weight(impl))
        chosen = impl.AveragedModel(one_weight(impl), None, len, use_buffers=True)
        lists = impl.AveragedModel(one_weight(impl), multi_avg_fn=max)
        names = "avg_fn", "multi_avg_fn", "use_buffers"
        return [[getattr(m, name) for name in names] for m in (averaged, chosen, lists)]

    assert same(scenario)[0] == "returned"


def test_repr_and_modules_are_those_of_torch() -> None:
    """Printing an averaged model and walking through it gives what torch gives."""

    def scenario(impl: Implementation):
        averaged = impl.AveragedModel(normed_net(impl))
        return repr(averaged), [n for n, _ in averaged.named_modules()]

    assert same(scenario)[0] == "returned"


def test_only_one_averaging_function_may_be_given() -> None:
    """Two averaging functions are refused with torch's AssertionError."""
    result = same(lambda impl: impl.AveragedModel(one_weight(impl), None, len, len))

    assert result[:2] == ("raised", "AssertionError")


@for_each("device", ["cpu", "meta", torch.device("meta"), torch.device("cpu", 0)])
def test_device_takes_the_copy_and_the_counter(impl: Implementation, device) -> None:
    """With a device, all of the averaged model lives there, and the model stays where it was."""
    model = normed_net(impl)
    averaged = impl.AveragedModel(model, device=device)

    assert {t.device.type for t in averaged.state_dict().values()} == {torch.device(device).type}
    assert {t.device.type for t in model.state_dict().values()} == {"cpu"}


def test_without_a_device_the_copy_stays_with_the_model_and_the_counter_on_the_default() -> None:
    """The copy of a meta model is meta, while its counter is made on the default device."""

    def scenario(impl: Implementation):
        averaged = impl.AveragedModel(normed_net(impl).to("meta"))
        return [(name, tensor.device) for name, tensor in averaged.state_dict().items()]

    assert same(scenario)[0] == "returned"


@for_each("device", ["nowhere", "", 1.5, []])
def test_bad_device_is_refused_as_in_torch(device) -> None:
    """An invalid device raises torch's error."""
    result = same(lambda impl: impl.AveragedModel(one_weight(impl), device))

    assert result[0] == "raised"


def test_averaging_function_in_the_place_of_the_device_is_refused(impl: Implementation) -> None:
    """The second positional argument is the device: a function there is a TypeError."""
    with pytest.raises(TypeError, match="invalid combination of arguments"):
        impl.AveragedModel(one_weight(impl), impl.get_ema_multi_avg_fn(0.9), use_buffers=True)


@for_each("model", [None, 3, "net", len])
def test_what_cannot_be_a_model_is_taken_until_it_is_used(model) -> None:
    """The model is not checked; a device, a call or an update raises if it is not a module."""

    def scenario(impl: Implementation):
        averaged = impl.AveragedModel(model)
        return averaged.module, list(averaged.state_dict())

    def use(impl: Implementation):
        impl.AveragedModel(model).update_parameters(model)

    assert same(scenario)[0] == "returned"
    assert same(use)[0] == "raised"


def test_modes_flags_and_hooks_are_copied_with_the_model(impl: Implementation) -> None:
    """The copy is in the model's mode, trains the same parameters and runs the same hooks."""
    calls = []
    model = normed_net(impl).eval()
    model[0].weight.requires_grad_(False)
    model[2].register_forward_hook(lambda *_: calls.append("hook"))
    averaged = impl.AveragedModel(model)
    averaged(torch.ones(2, 3))

    assert averaged.training
    assert not any(module.training for module in averaged.module.modules())
    assert [p.requires_grad for p in averaged.parameters()] == [False, *[True] * 5]
    assert calls == ["hook"]


def test_calling_calls_the_copy(impl: Implementation) -> None:
    """Positional and keyword arguments reach the copy, and its result is returned as it is."""

    class Echo(impl.nn.Module):
        def forward(self, *args, **kwargs):
            return self, args, kwargs

    averaged = impl.AveragedModel(Echo())

    assert averaged(1, 2, three=4) == (averaged.module, (1, 2), {"three": 4})


def test_hooks_of_the_averaged_model_run(impl: Implementation) -> None:
    """Hooks registered on the averaged model see the copy's output."""
    averaged = impl.AveragedModel(one_weight(impl, 3.0))
    averaged.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    averaged.register_forward_hook(lambda module, args, output: output * 10)

    assert averaged(torch.ones(1, 1)).item() == 60.0


def test_gradients_reach_the_copy_only(impl: Implementation) -> None:
    """A backward pass through the averaged model leaves gradients in it, not in the model."""
    model = one_weight(impl, 2.0)
    averaged = impl.AveragedModel(model)
    averaged(torch.ones(1, 1)).backward()

    assert averaged.module.weight.grad == 1.0
    assert model.weight.grad is None


@for_each("rule", RULES)
def test_signature_by_position_is_that_of_torch(rule: str) -> None:
    """All five arguments may be given by position, in torch's order."""

    def scenario(impl: Implementation):
        functions = {"avg_fn": None, "multi_avg_fn": None, **RULES[rule](impl)}
        averaged = impl.AveragedModel(normed_net(impl), "cpu", *functions.values(), True)
        return averaged, averaged.use_buffers

    assert same(scenario)[0] == "returned"


def test_subclass_calls_the_initialization_of_its_bases_in_order(impl: Implementation) -> None:
    """A subclass with further attributes works as in torch: super().__init__ takes the model."""

    class Named(impl.AveragedModel):
        def __init__(self, model, name: str) -> None:
            super().__init__(model, use_buffers=True)
            self.name = name

        def forward(self, x):
            return self.name, super().forward(x)

    averaged = Named(one_weight(impl, 5.0), "swa")

    assert averaged(torch.ones(1, 1)) == ("swa", torch.tensor([[5.0]]))
    assert averaged.use_buffers


@pytest.mark.parametrize("device", ["cpu", None])
def test_an_average_on_a_device_follows_a_model_elsewhere(
    impl: Implementation, device: str | None
) -> None:
    """A model in another dtype and a default device elsewhere do not change the average's place."""
    model = build(impl, "layer")
    averaged = impl.AveragedModel(model, device)
    with torch.device("meta"):
        averaged.update_parameters(model)
        averaged.update_parameters(model)

    assert {t.device.type for t in averaged.parameters()} == {"cpu"}
    assert torch.equal(averaged.module.weight, model.weight)


@every_subject
def test_a_replaced_copy_is_averaged_into(impl: Implementation, subject: str) -> None:
    """If `module` is replaced by `set_submodule`, updates go on in the new copy."""
    model, averaged = averaged_of(impl, subject, 3)
    new = build(impl, subject)
    with torch.no_grad():
        for parameter in new.parameters():
            parameter.fill_(1.0)
    averaged.set_submodule("module", new)
    list(training_states(model, 1))
    averaged.update_parameters(model)

    assert averaged.module is new
    assert averaged.n_averaged == 4
    for own, other in zip(new.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(own, 1 + (other - 1) / 4)
