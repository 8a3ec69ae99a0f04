import itertools

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from modkit.averaging import rules
from tests.cases import for_each
from tests.helpers import Implementation, same
from tests.models import normed_net, one_weight, set_weight
from tests.parity.averaging.rules import (
    RULES,
    states_after_updates,
    training_states,
)
from tests.unit.averaging.recipes import as_accelerator


every_rule = for_each("rule", RULES)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64]
)
@pytest.mark.parametrize("use_buffers", [False, True])
@pytest.mark.parametrize("on_device", [False, True])
@every_rule
def test_updates_give_the_bits_of_torch(
    rule: str, on_device: bool, use_buffers: bool, dtype, monkeypatch
) -> None:
    """Six updates are bitwise identical in every parameter and buffer, also on an accelerator."""
    if on_device:
        as_accelerator(monkeypatch)

    def scenario(impl: Implementation):
        if dtype.is_complex:
            members = [torch.zeros(19, dtype=dtype), torch.zeros((), dtype=dtype)]
            model = impl.nn.ParameterList(members)
        else:
            model = normed_net(impl).to(dtype)
            if use_buffers:
                # Torch averages integers too, or fails to.
                del model[1].num_batches_tracked
        averaged = impl.AveragedModel(model, **RULES[rule](impl), use_buffers=use_buffers)
        return states_after_updates(averaged, model, 6)

    assert same(scenario)[0] == "returned"


def test_non_persistent_buffers_follow_the_model(impl: Implementation) -> None:
    """Buffers that are not saved are brought up to date like the others."""
    model = one_weight(impl)
    model.register_buffer("scratch", torch.zeros(2), persistent=False)
    averaged = impl.AveragedModel(model)
    model.scratch.fill_(4.0)
    averaged.update_parameters(model)

    assert averaged.module.scratch.tolist() == [4.0, 4.0]
    assert "module.scratch" not in averaged.state_dict()


def test_what_avg_fn_gets(impl: Implementation) -> None:
    """avg_fn gets one averaged and one current tensor, both detached, and the count as tensor."""
    seen = []

    def keep(averaged, current, count):
        seen.append((averaged, current, count.clone()))
        return averaged

    model = normed_net(impl)
    averaged = impl.AveragedModel(model, avg_fn=keep)
    for _ in range(3):
        averaged.update_parameters(model)

    assert [int(count) for _, _, count in seen] == [1] * 6 + [2] * 6
    assert [a.shape for a, _, _ in seen[:6]] == [p.shape for p in model.parameters()]
    assert not any(a.requires_grad or c.requires_grad for a, c, _ in seen)
    assert seen[0][0].data_ptr() == averaged.module[0].weight.data_ptr()
    assert torch.equal(seen[0][1], model[0].weight)


def test_avg_fn_is_called_in_the_order_of_the_model() -> None:
    """A function with a weight for each parameter gets them in that order, whatever their dtypes."""

    def scenario(impl: Implementation):
        weights = itertools.cycle(range(6))

        def merged(average, current, count):
            return average + (current - average) * next(weights) / 8

        first, last = (impl.nn.Linear(2, 2).bfloat16() for _ in range(2))
        model = impl.nn.Sequential(first, impl.nn.LayerNorm(2), last)
        averaged = impl.AveragedModel(model, avg_fn=merged)
        return states_after_updates(averaged, model, 4)

    assert same(scenario)[0] == "returned"


class WithoutLists(TwoTensor):
    """Wraps two tensors, and has no kernels for lists, as subclasses of torchao."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args, kwargs):
        if "foreach" in str(func):
            raise NotImplementedError(f"{func} of WithoutLists")
        return super().__torch_dispatch__(func, types, args, kwargs)


@pytest.mark.parametrize("as_buffer", [False, True])
@pytest.mark.parametrize("use_buffers", [False, True])
def test_subclasses_are_taken_one_by_one(use_buffers: bool, as_buffer: bool) -> None:
    """Tensors that wrap others need no kernels for lists, beside plain tensors and each other."""

    def scenario(impl: Implementation):
        model = impl.nn.Linear(2, 2)
        for name in ("first", "second"):
            wrapper = WithoutLists(torch.zeros(3), torch.ones(3))
            if as_buffer:
                model.register_buffer(name, wrapper)
            else:
                model.register_parameter(name, impl.nn.Parameter(wrapper))
        averaged = impl.AveragedModel(
            model, avg_fn=impl.swa_utils.get_ema_avg_fn(0.5), use_buffers=use_buffers
        )
        seen = []
        for _ in range(3):
            with torch.no_grad():
                for tensor in model.state_dict().values():
                    tensor.add_(1)
            averaged.update_parameters(model)
            module = averaged.module
            seen += [module.weight.clone(), module.first.a.clone(), module.second.b.clone()]
        return seen

    assert same(scenario)[0] == "returned"


def test_what_multi_avg_fn_gets(impl: Implementation) -> None:
    """multi_avg_fn is called for each dtype, with two lists of detached tensors and the count."""
    seen = []
    model = normed_net(impl)
    del model[1].num_batches_tracked
    model[3].double()
    averaged = impl.AveragedModel(
        model, multi_avg_fn=lambda a, c, n: seen.append((a, c, int(n))), use_buffers=True
    )
    for _ in range(2):
        averaged.update_parameters(model)
    shapes = {a[0].dtype: [t.shape for t in a] for a, _, _ in seen}

    assert all(type(a) is type(c) is list and len(a) == len(c) for a, c, _ in seen)
    assert {len({t.dtype for t in a}) for a, _, _ in seen} == {1}
    assert not any(t.requires_grad for a, c, _ in seen for t in (*a, *c))
    assert shapes == {
        torch.float32: [(4, 3), (4,), (4,), (4,), (4,), (4,)],
        torch.float64: [(2, 4), (2,)],
    }
    assert {count for _, _, count in seen} == {1}


def test_gradient_mode_is_left_to_the_function(impl: Implementation) -> None:
    """Averaging functions of the user run in the gradient mode of the caller."""
    modes = []

    def note(averaged, current, count):
        modes.append(torch.is_grad_enabled())
        return averaged

    model = one_weight(impl)
    averaged = impl.AveragedModel(model, avg_fn=note)
    averaged.update_parameters(model)
    averaged.update_parameters(model)
    with torch.no_grad():
        averaged.update_parameters(model)

    assert modes == [True, False]


@every_rule
def test_averages_stay_trainable_leaves(impl: Implementation, rule: str) -> None:
    """Updates keep the Parameter objects, record no graph and leave gradients alone."""
    model = normed_net(impl)
    averaged = impl.AveragedModel(model, **RULES[rule](impl))
    objects = list(averaged.parameters())
    for _ in range(3):
        averaged.update_parameters(model)

    assert all(a is b for a, b in zip(averaged.parameters(), objects, strict=True))
    assert all(p.is_leaf and p.requires_grad and p.grad is None for p in objects)


def test_functions_may_be_exchanged_between_updates(impl: Implementation) -> None:
    """The attributes are read at each update, and multi_avg_fn comes first if both are set."""
    model = one_weight(impl)
    averaged = impl.AveragedModel(model)
    for value, avg_fn, multi_avg_fn in [
        (1.0, None, None),
        (3.0, impl.get_ema_avg_fn(0.5), None),
        (4.0, impl.get_ema_avg_fn(0.5), impl.get_ema_multi_avg_fn(0.0)),
        (8.0, None, None),
    ]:
        averaged.avg_fn, averaged.multi_avg_fn = avg_fn, multi_avg_fn
        averaged.update_parameters(set_weight(model, value))

    assert averaged.module.weight.item() == 5.0


def test_default_update_with_grouped_kernels_is_that_of_torch(monkeypatch) -> None:
    """Where lists of tensors have fused kernels, the default is the grouped equal average."""
    monkeypatch.setattr(
        "torch.optim.swa_utils._get_foreach_kernels_supported_devices", lambda: ["cpu"]
    )
    monkeypatch.setattr(rules, "has_foreach_kernels", lambda device: True)

    def scenario(impl: Implementation):
        model = normed_net(impl)
        default = impl.AveragedModel(model)
        grouped = impl.AveragedModel(model, multi_avg_fn=impl.get_swa_multi_avg_fn())
        for _ in training_states(model, 6):
            default.update_parameters(model)
            grouped.update_parameters(model)
        pairs = zip(default.parameters(), grouped.parameters(), strict=True)
        return all(torch.equal(a, b) for a, b in pairs), default

    result = same(scenario)

    assert result[1][1][0] == ("bool", "True")
