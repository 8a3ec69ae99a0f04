import warnings

import pytest
import torch

from tests.helpers import MODKIT, Implementation, freeze
from tests.unit.averaging.recipes import CountCalls, as_accelerator


EMA = "multi_avg_fn ema"
# How each rule of the library is asked for.
RULES = {
    "default": lambda impl: {},
    "avg_fn ema": lambda impl: {"avg_fn": impl.get_ema_avg_fn(0.5)},
    "multi_avg_fn swa": lambda impl: {"multi_avg_fn": impl.get_swa_multi_avg_fn()},
    EMA: lambda impl: {"multi_avg_fn": impl.get_ema_multi_avg_fn(0.5)},
}
every_rule = pytest.mark.parametrize("rule", RULES)


def holder(impl: Implementation, **values: torch.Tensor) -> torch.nn.Module:
    """Build a module that has these parameters, in this order."""
    module = impl.own.Module()
    for name, value in values.items():
        needs_grad = value.is_floating_point()
        module.register_parameter(name, impl.own.Parameter(value.clone(), requires_grad=needs_grad))
    return module


def with_buffer(impl: Implementation, value: torch.Tensor) -> torch.nn.Module:
    module = holder(impl, weight=torch.ones(1))
    module.register_buffer("buffer", value.clone())
    return module


def updated(impl: Implementation, model, rule: str, *states, **arguments) -> torch.nn.Module:
    """Average a model that takes these states, one after the other."""
    averaged = impl.AveragedModel(model, **RULES[rule](impl), **arguments)
    for state in states:
        with torch.no_grad():
            model.load_state_dict(state)
        averaged.update_parameters(model)
    return averaged


def test_parameters_are_paired_by_name(impl: Implementation) -> None:
    """A model that registers its parameters in another order updates each average with its own."""
    one, two = torch.ones(1), torch.ones(1) * 2
    averaged = impl.AveragedModel(holder(impl, a=one, b=two))
    averaged.update_parameters(holder(impl, b=two * 5, a=one * 5))

    assert (averaged.module.a.item(), averaged.module.b.item()) == (5.0, 10.0)


def test_a_model_of_other_names_in_the_same_order(impl: Implementation) -> None:
    """Two classes that register the same shapes under other names can be averaged by position."""
    averaged = impl.AveragedModel(holder(impl, a=torch.ones(1), b=torch.ones(1)))
    averaged.update_parameters(holder(impl, c=torch.ones(1) * 5, d=torch.ones(1) * 10))

    assert (averaged.module.a.item(), averaged.module.b.item()) == (5.0, 10.0)


class Parts:
    """An object that has tensors without being a module."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.parameters = module.parameters
        self.buffers = module.buffers


def test_an_object_that_is_not_a_module_can_update_an_average(impl: Implementation) -> None:
    """An object with parameters() and buffers() is enough for pairing by position."""
    averaged = impl.AveragedModel(holder(impl, a=torch.ones(1)))
    averaged.update_parameters(Parts(holder(impl, a=torch.ones(1) * 5)))

    assert averaged.module.a.item() == 5.0


def test_an_object_that_is_not_a_module_is_refused() -> None:
    """Tensors are paired by the names that modules give them, and nothing is written without."""
    averaged = MODKIT.AveragedModel(holder(MODKIT, a=torch.ones(1)))
    with pytest.raises(AttributeError, match="'Parts' object has no attribute 'modules'"):
        averaged.update_parameters(Parts(holder(MODKIT, a=torch.ones(1) * 5)))

    assert averaged.module.a.item() == 1.0
    assert averaged.n_averaged == 0


@every_rule
def test_a_parameter_that_is_a_buffer_too_is_averaged(impl: Implementation, rule: str) -> None:
    """One tensor under two names is averaged once, and not overwritten by the copy of a buffer."""
    model = holder(impl, weight=torch.ones(1))
    model._buffers["same"] = model.weight
    averaged = impl.AveragedModel(model, **RULES[rule](impl))
    for value in 1.0, 3.0:
        with torch.no_grad():
            model.weight.fill_(value)
        averaged.update_parameters(model)

    assert averaged.module.weight.item() == 2.0


@every_rule
@pytest.mark.parametrize("size", [1, 3])
def test_a_subclass_may_have_parameters_of_its_own(
    impl: Implementation, rule: str, size: int
) -> None:
    """Members that a subclass registers are neither read nor written."""

    class WithHead(impl.AveragedModel):
        def __init__(self, *args, **kwargs) -> None:
            super().__init__(*args, **kwargs)
            self.head = impl.own.Parameter(torch.full((size,), 7.0))

    for use_buffers in False, True:
        model = holder(impl, a=torch.zeros(3), b=torch.ones(3))
        averaged = WithHead(model, use_buffers=use_buffers, **RULES[rule](impl))
        for value in 1.0, 2.0:
            with torch.no_grad():
                model.a.fill_(value)
            averaged.update_parameters(model)

        assert averaged.head.tolist() == [7.0] * size
        assert averaged.module.a.tolist() == [1.5] * 3
        assert averaged.module.b.tolist() == [1.0] * 3


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"c": torch.ones(1)}, "unexpected: c"),
        ({"b": None}, "missing: b"),
        ({"b": torch.ones(1)}, r"b \(\(1,\) instead of \(3,\)\)"),
    ],
    ids=["unexpected", "missing", "shape"],
)
@every_rule
def test_a_model_that_does_not_fit_is_refused(impl, rule: str, change: dict, named: str) -> None:
    """An error names what does not fit, and the average is what it was."""
    fitting = {"a": torch.zeros(2), "b": torch.ones(3)}
    averaged = impl.AveragedModel(holder(impl, **fitting), **RULES[rule](impl))
    averaged.update_parameters(holder(impl, **fitting))
    before = freeze(dict(averaged.state_dict()))
    other = {name: value for name, value in {**fitting, **change}.items() if value is not None}
    problem = "^AveragedModel: the model is not the one that is averaged: 1 "
    with pytest.raises(ValueError, match=f"{problem}.*{named}"):
        averaged.update_parameters(holder(impl, **other))

    assert freeze(dict(averaged.state_dict())) == before


def test_a_buffer_that_came_later_is_refused_before_anything_is_written(impl) -> None:
    """A buffer that only the model has is an error, and no parameter has been copied then."""
    model = holder(impl, weight=torch.ones(1))
    averaged = impl.AveragedModel(model)
    with torch.no_grad():
        model.weight.fill_(5.0)
    model.register_buffer("late", torch.ones(1))
    with pytest.raises(ValueError):
        averaged.update_parameters(model)

    assert averaged.module.weight.item() == 1.0


def test_tying_after_the_copy_shifts_nothing(impl: Implementation) -> None:
    """Weights that the model has tied since are averaged under both names."""
    one = torch.ones(1)
    model = holder(impl, a=one, b=one * 2, c=one * 3)
    averaged = impl.AveragedModel(model)
    model.b = model.a
    averaged.update_parameters(model)

    assert [p.item() for p in averaged.module.parameters()] == [1.0, 1.0, 3.0]


@every_rule
@pytest.mark.parametrize("use_buffers", [False, True])
def test_an_update_never_asks_for_a_value(
    impl: Implementation, rule: str, use_buffers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No update on an accelerator reads a tensor on the host; the CPU stands in for one."""
    as_accelerator(monkeypatch)
    model = impl.own.Linear(2, 2)
    model.register_buffer("mean", torch.zeros(2))
    averaged = impl.AveragedModel(model, **RULES[rule](impl), use_buffers=use_buffers)
    averaged.update_parameters(model)
    with CountCalls("_local_scalar_dense") as count:
        for _ in range(3):
            averaged.update_parameters(model)

    assert count.calls == []


@every_rule
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool])
def test_buffers_without_fractions_are_copied(impl: Implementation, rule: str, dtype) -> None:
    """With use_buffers, counters and masks are those of the last model, not rounded averages."""
    states = [{"weight": torch.ones(1), "buffer": torch.tensor(v)} for v in ([8, 0, 1], [0, 0, 1])]
    model = with_buffer(impl, torch.zeros(3, dtype=dtype))
    averaged = updated(impl, model, rule, *states, use_buffers=True)

    assert averaged.module.buffer.tolist() == model.buffer.tolist()
    assert averaged.module.buffer.dtype == dtype


@every_rule
def test_quantized_buffers_are_copied(impl: Implementation, rule: str) -> None:
    """With use_buffers, a quantized buffer is that of the last model."""
    model = with_buffer(impl, torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8))
    averaged = impl.AveragedModel(model, **RULES[rule](impl), use_buffers=True)
    averaged.update_parameters(model)
    model.buffer = torch.quantize_per_tensor(torch.zeros(3), 0.1, 0, torch.qint8)
    averaged.update_parameters(model)

    assert averaged.module.buffer.is_quantized
    assert averaged.module.buffer.dequantize().tolist() == [0.0, 0.0, 0.0]


@every_rule
def test_the_count_of_batches_is_that_of_the_model(impl: Implementation, rule: str) -> None:
    """An averaged batch normalization has seen as many batches as the model's."""
    model = impl.own.BatchNorm1d(2)
    averaged = impl.AveragedModel(model, **RULES[rule](impl), use_buffers=True)
    for _ in range(5):
        model(torch.randn(4, 2))
        averaged.update_parameters(model)

    assert averaged.module.num_batches_tracked == 5


@pytest.mark.parametrize("rule", ["multi_avg_fn swa", EMA])
def test_an_average_in_float32_follows_a_model_in_bfloat16(impl: Implementation, rule) -> None:
    """The rules for lists average across dtypes, and the average keeps its own."""
    model = holder(impl, weight=torch.ones(2).bfloat16())
    averaged = impl.AveragedModel(model, **RULES[rule](impl)).float()
    for value in 1.0, 1.0078125:
        with torch.no_grad():
            model.weight.fill_(value)
        averaged.update_parameters(model)

    assert averaged.module.weight.tolist() == [1.00390625, 1.00390625]


def test_models_with_weight_norm_are_copied_after_a_call(impl: Implementation) -> None:
    """Weight normalization of the old kind keeps a result of autograd, which is copied as values."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        model = impl.submodule("nn.utils").weight_norm(impl.own.Linear(2, 2))
    inputs = torch.ones(1, 2)
    expected = model(inputs)
    averaged = impl.AveragedModel(model)
    averaged.update_parameters(model)

    assert torch.equal(averaged(inputs), expected)


def test_models_that_keep_results_are_copied(impl: Implementation) -> None:
    """A result of autograd that a module or a list in it keeps is copied once, as values."""
    model = holder(impl, weight=torch.ones(1))
    model.last = model.weight * 2
    model.history = [model.last]
    averaged = impl.AveragedModel(model)

    assert averaged.module.last.item() == 2.0
    assert averaged.module.last.requires_grad is False
    assert averaged.module.history[0] is averaged.module.last


def test_lazy_models_are_averaged_once_they_have_shapes(impl: Implementation) -> None:
    """An average that was made before the model's first call gets its shapes at the first update."""
    model = impl.own.LazyLinear(2)
    averaged = impl.AveragedModel(model)
    inputs = torch.ones(1, 3)
    expected = model(inputs)
    averaged.update_parameters(model)
    averaged.update_parameters(model)

    assert torch.equal(averaged(inputs), expected)


def test_a_model_may_hold_its_average(impl: Implementation) -> None:
    """An average that is a child of the model is not averaged itself."""
    model = impl.own.Linear(1, 1)
    model.average = impl.AveragedModel(model)
    with torch.no_grad():
        model.weight.fill_(3.0)
    for _ in range(2):
        model.average.update_parameters(model)

    assert model.average.module.weight.item() == 3.0
    assert model.average.n_averaged == 2


@every_rule
def test_an_update_is_one_graph_for_the_compiler(impl: Implementation, rule: str) -> None:
    """The update compiles as a whole, below a count of zero too, and gives the values of an eager one."""
    torch._dynamo.reset()
    model = impl.own.Linear(2, 2)
    model.register_buffer("mean", torch.zeros(2))
    averaged, eager = (impl.AveragedModel(model, **RULES[rule](impl)) for _ in range(2))
    for average in averaged, eager:
        average.n_averaged.fill_(-2)
    update = torch.compile(averaged.update_parameters, backend="eager", fullgraph=True)
    for value in 2.0, float("nan"), 1.0, 2.0, 4.0:
        with torch.no_grad():
            model.weight.fill_(value)
            model.mean.fill_(value)
        update(model)
        eager.update_parameters(model)

    assert averaged.n_averaged == 3
    assert torch.equal(averaged.module.mean, model.mean)
    torch.testing.assert_close(averaged.module.weight, eager.module.weight)


def test_an_average_made_in_inference_mode_can_be_updated(impl: Implementation) -> None:
    """Where it was built does not matter for later updates."""
    model = impl.own.Linear(1, 1)
    with torch.inference_mode():
        averaged = impl.AveragedModel(model)
    averaged.update_parameters(model)
    averaged.update_parameters(model)

    assert averaged.n_averaged == 2


@pytest.mark.parametrize("use_buffers", [False, True])
def test_buffers_may_change_their_shape(impl: Implementation, use_buffers: bool) -> None:
    """A buffer that has another shape than before is copied whole."""
    model = with_buffer(impl, torch.zeros(2))
    averaged = impl.AveragedModel(model, use_buffers=use_buffers)
    averaged.update_parameters(model)
    model.buffer = torch.ones(3)
    averaged.update_parameters(model)
    model.buffer.zero_()

    assert averaged.module.buffer.tolist() == [1.0, 1.0, 1.0]


def test_what_a_function_keeps_does_not_change(impl: Implementation) -> None:
    """Counts that an averaging function keeps stay what they were."""
    counts = []
    model = impl.own.Linear(1, 1)
    averaged = impl.AveragedModel(model, multi_avg_fn=lambda a, c, count: counts.append(count))
    for _ in range(4):
        averaged.update_parameters(model)

    assert [int(count) for count in counts] == [1, 2, 3]
