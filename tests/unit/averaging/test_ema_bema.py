import pytest
import torch
from torch import Tensor

import modkit
from modkit.schedules import BEMA, Constant
from tests.cases import for_each
from tests.unit.averaging.recipes import averaged, model_of, set_to


def walk(steps: int) -> list[Tensor]:
    """Return the weights of a run that drifts, the initial ones first."""
    generator = torch.Generator().manual_seed(0)
    moves = torch.randn(steps + 1, 5, dtype=torch.float64, generator=generator).add_(0.3)
    return list(moves.cumsum(0))


def by_the_paper(weights: list[Tensor], options: dict[str, float], every: int) -> Tensor:
    """Return what the algorithm of the paper gives, in its own symbols."""
    rho, gamma = options.get("lag", 10), options.get("multiplier", 1.0)
    kappa, eta = options.get("ema_power", 0.5), options.get("bias_power", 0.2)
    first = ema = result = weights[0]
    for t in range(every, len(weights), every):
        beta = max((rho + gamma * t) ** -kappa, options.get("min_ema_multiplier", 0.0))
        alpha = (rho + gamma * t) ** -eta
        ema = (1 - beta) * ema + beta * weights[t]
        result = ema + alpha * (weights[t] - first)
    return result


OPTIONS: list[dict[str, float]] = [
    {},
    {"ema_power": 0.0, "lag": 1},
    {"bias_power": 0.0},
    {"lag": 100, "multiplier": 2.0},
    {"min_ema_multiplier": 0.4},
]


@for_each("every", [1, 10])
@for_each("options", OPTIONS, ids=str)
def test_it_is_the_algorithm_of_the_paper(options: dict[str, float], every: int) -> None:
    """With an update before training, the average is that of the paper at each frequency."""
    weights = walk(60)
    model = model_of(weights[0].clone(), torch.float64)
    ema = modkit.EMA(model, schedule=BEMA(**options), update_every=every)
    for value in weights:
        set_to(model, value)
        ema.update()

    torch.testing.assert_close(averaged(ema), by_the_paper(weights, options, every))


def test_without_correction_it_is_the_plain_average() -> None:
    """A correction that fades at once leaves what the decays alone give."""
    weights = walk(20)
    model = model_of(weights[0].clone(), torch.float64)
    bema = BEMA(bias_power=400)
    both = modkit.EMA(model, schedule=[bema, bema.decay_at])
    for value in weights:
        set_to(model, value)
        both.update()

    torch.testing.assert_close(averaged(both, index=0), averaged(both, index=1))


def test_frozen_parameters_stay_as_they_are() -> None:
    """A parameter that is not trained is its own average beside one that is."""
    weights = walk(8)
    model = model_of(weights[0].clone(), torch.float64)
    model.frozen = torch.nn.Parameter(weights[1].clone(), requires_grad=False)
    ema = modkit.EMA(model, schedule=BEMA())
    for value in weights:
        with torch.no_grad():
            model.weight.copy_(value)
        ema.update()

    assert torch.equal(averaged(ema, "frozen"), weights[1])
    torch.testing.assert_close(averaged(ema), by_the_paper(weights, {}, 1))


def test_a_bad_step_is_skipped() -> None:
    """What is not finite leaves average and correction as they were."""
    model = model_of([1.0, 2.0])
    ema = modkit.EMA(model, schedule=BEMA(), on_nonfinite="skip")
    ema.update()
    set_to(model, 3.0)
    ema.update()
    before = averaged(ema).clone()
    set_to(model, float("nan"))
    ema.update()

    assert torch.equal(averaged(ema), before)
    assert before.isfinite().all()


def test_it_is_swapped_in_with_the_correction() -> None:
    """The model holds the corrected average in the block, and its own weights after it."""
    weights = walk(5)
    model = model_of(weights[0].clone(), torch.float64)
    ema = modkit.EMA(model, schedule=BEMA(), precision="same")
    for value in weights:
        set_to(model, value)
        ema.update()
    with ema.applied():
        inside = model.weight.detach().clone()

    torch.testing.assert_close(inside, by_the_paper(weights, {}, 1))
    assert torch.equal(model.weight, weights[-1])


def test_the_state_of_a_plain_average_is_taken_as_the_beginning() -> None:
    """An average of another kind is average and first model of what follows."""
    model = model_of(1.0, torch.float64)
    plain = modkit.EMA(model, schedule=Constant(0.5))
    plain.update()
    state = plain.state_dict()
    state["schedules"] = [BEMA().to_config()]
    ema = modkit.EMA(model, schedule=BEMA())
    ema.load_state_dict(state)
    set_to(model, 2.0)
    ema.update()

    assert averaged(ema).item() == pytest.approx(1 + 11**-0.5 + 11**-0.2)


@for_each(
    ("option", "value"), [("ema_power", -1), ("bias_power", "x"), ("lag", 0), ("multiplier", -1)]
)
def test_bad_options_are_refused(option: str, value: object) -> None:
    """The error names the option and the value."""
    with pytest.raises((TypeError, ValueError), match=f"BEMA: {option} must be .* got {value!r}"):
        BEMA(**{option: value})  # type: ignore[arg-type]
