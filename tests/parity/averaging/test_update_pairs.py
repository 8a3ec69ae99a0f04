import pytest
import torch

from tests.capabilities import MIXED_DTYPES
from tests.cases import for_each
from tests.helpers import Implementation, same
from tests.models import normed_net, one_weight, set_weight
from tests.parity.averaging.rules import RULES, state_after_updates, training_states


TENSOR_BY_TENSOR = [rule for rule in RULES if rule.startswith("avg_fn")]
IN_GROUPS = [rule for rule in RULES if rule not in TENSOR_BY_TENSOR]

# One kernel does the arithmetic of these, and takes one dtype.
LERPS = {"multi_avg_fn swa", "multi_avg_fn ema"}


@for_each("rule", [rule for rule in RULES if rule not in LERPS])
def test_average_and_model_may_differ_in_dtype(rule: str) -> None:
    """A float32 average of a bfloat16 model, and the reverse, does what torch does."""
    if not MIXED_DTYPES and rule in {"default", "multi_avg_fn own"}:
        pytest.skip("this torch refuses; the next test has the difference")

    def scenario(impl: Implementation):
        result = []
        for kept, trained in [(torch.float32, torch.bfloat16), (torch.float16, torch.float32)]:
            averaged = impl.AveragedModel(one_weight(impl), **RULES[rule](impl)).to(kept)
            models = [one_weight(impl, value).to(trained) for value in (0.3, 0.7)]
            result.append(state_after_updates(averaged, *models))
        return result

    assert same(scenario)[0] == "returned"


def test_float_average_of_a_half_model_keeps_its_precision(impl: Implementation) -> None:
    """The equal average of a bfloat16 model in float32 resolves what bfloat16 cannot."""
    averaged = impl.AveragedModel(one_weight(impl).bfloat16()).float()
    for value in 256.0, 258.0:
        averaged.update_parameters(one_weight(impl, value).bfloat16())

    assert averaged.module.weight.item() == 257.0
    assert averaged.module.weight.dtype == torch.float32


def updated_twice_without_parameters(impl: Implementation, rule: str) -> int:
    """Average a model that has no tensors, and return the count."""
    averaged = impl.AveragedModel(impl.nn.ReLU(), **RULES[rule](impl))
    averaged.update_parameters(impl.nn.ReLU())
    averaged.update_parameters(impl.nn.ReLU())
    return averaged.n_averaged.item()


@pytest.mark.parametrize("rule", TENSOR_BY_TENSOR)
def test_model_without_parameters_is_averaged_tensor_by_tensor(impl, rule: str) -> None:
    """With avg_fn, the updates of a model that has nothing to average are counted."""
    assert updated_twice_without_parameters(impl, rule) == 2


@pytest.mark.parametrize("rule", IN_GROUPS)
def test_model_without_parameters_is_averaged_in_groups(impl, rule: str) -> None:
    """With multi_avg_fn or by default, they are counted in the same way."""
    assert updated_twice_without_parameters(impl, rule) == 2


def test_meta_tensors_are_refused_as_in_torch() -> None:
    """Neither a meta average nor a meta model can be updated with values."""

    def scenario(impl: Implementation):
        real, meta = normed_net(impl), normed_net(impl).to("meta")
        return [
            state_after_updates(impl.AveragedModel(real), meta),
            state_after_updates(impl.AveragedModel(meta), real),
            state_after_updates(impl.AveragedModel(meta, device="meta"), meta),
        ]

    assert same(scenario)[0] == "returned"


@for_each("model", [None, {}, torch.ones(1), "net"])
def test_update_with_something_else_is_refused_as_in_torch(model) -> None:
    """A model without parameters raises torch's error and leaves the average unchanged."""

    def scenario(impl: Implementation):
        return state_after_updates(impl.AveragedModel(one_weight(impl, 3.0)), model)

    assert same(scenario)[0] == "returned"


def test_wrapped_models_are_paired_with_what_they_wrap(impl: Implementation) -> None:
    """A compiled or data-parallel model updates the average of the plain one, and the reverse."""
    model = one_weight(impl)
    averaged = impl.AveragedModel(model)
    compiled = torch.compile(set_weight(model, 2.0), backend="eager")
    averaged.update_parameters(compiled)
    averaged.update_parameters(impl.nn.DataParallel(set_weight(model, 4.0)))
    wrapped = impl.AveragedModel(compiled)
    wrapped.update_parameters(model)

    assert averaged.module.weight.item() == 3.0
    assert wrapped(torch.ones(1, 1)).item() == 4.0


def wrapped(impl: Implementation, net: torch.nn.Module) -> torch.nn.Module:
    """Build a module that holds a network under a name of its own, as trainers and losses do."""
    return impl.nn.ModuleDict({"net": net})


@for_each("rule", ["default", "avg_fn ema", "multi_avg_fn own"])
@for_each(("count", "use_buffers"), [(1, False), (6, True)])
@for_each("averaged_one", ["net", "wrapper", "wrapper of the wrapper"])
@for_each("given", ["net", "wrapper", "wrapper of the wrapper"])
def test_a_wrapper_and_its_network_are_paired(
    rule: str, count: int, use_buffers: bool, averaged_one: str, given: str
) -> None:
    """One common prefix does not matter: average and model may be the network or what wraps it."""

    def scenario(impl: Implementation):
        layers = (impl.nn.Linear(2, 2) for _ in range(count))
        net = impl.nn.Sequential(*layers, impl.nn.BatchNorm1d(2))
        if use_buffers:
            # Torch averages integers too, or fails to.
            del net[-1].num_batches_tracked
        models = {"net": net, "wrapper": wrapped(impl, net)}
        models["wrapper of the wrapper"] = wrapped(impl, models["wrapper"])
        averaged = impl.AveragedModel(
            models[averaged_one], **RULES[rule](impl), use_buffers=use_buffers
        )
        states = []
        for _ in training_states(net, 4):
            averaged.update_parameters(models[given])
            states.append({name: one.clone() for name, one in averaged.state_dict().items()})
        return states

    assert same(scenario)[0] == "returned"
