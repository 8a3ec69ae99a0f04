import dataclasses
import math
import random
from fractions import Fraction

import numpy as np
import pytest
import torch

import modkit
from modkit import schedules
from modkit.schedules import (
    Constant,
    CountWarmup,
    Custom,
    Equal,
    InverseGamma,
    PerUpdate,
    Power,
    profile,
)
from tests.cases import for_each
from tests.unit.averaging.recipes import averaged, model_of, set_to


def largest_root(sigma_rel):
    """Return the exponent of a width, as EDM2 computes it."""
    return np.roots([1, 7, 16 - sigma_rel**-2, 12 - sigma_rel**-2]).real.max()


def clip(values, low, high):
    """Hold the values between two bounds."""
    return np.minimum(np.maximum(values, low), high)


# The formulas of the sources, in NumPy over all steps; n is as in schedules.py.
REFERENCES = [
    pytest.param(Constant(0.9999), lambda n: np.full(n.shape, 0.9999), id="torch"),
    pytest.param(
        InverseGamma(inv_gamma=1.0, power=2 / 3, decay=0.9999),
        lambda n: clip(1 - (1 + n / 1.0) ** (-2 / 3), 0.0, 0.9999),
        id="k-diffusion and ema-pytorch",
    ),
    pytest.param(
        InverseGamma(inv_gamma=7.0, power=3 / 4, min_decay=0.2, decay=0.999),
        lambda n: clip(1 - (1 + n / 7.0) ** (-3 / 4), 0.2, 0.999),
        id="diffusers and timm",
    ),
    pytest.param(
        InverseGamma(inv_gamma=100.0, power=1.0, decay=0.9998),
        lambda n: 1 - np.maximum(0.0002, 100.0 / (100.0 + n)),
        id="mmengine",
    ),
    pytest.param(
        CountWarmup(0.9999),
        lambda n: np.minimum(0.9999, (1 + n) / (10 + n)),
        id="tensorflow and torch_ema",
    ),
    pytest.param(
        CountWarmup(0.9999, min_decay=0.5),
        lambda n: clip((1 + n) / (10 + n), 0.5, 0.9999),
        id="diffusers without warm-up",
    ),
    pytest.param(
        CountWarmup(0.999, offset=2000),
        lambda n: np.minimum(0.999, (1 + n) / (2000 + n)),
        id="d2go",
    ),
    pytest.param(Equal(), lambda n: 1 - 1 / (n + 1), id="swa"),
    pytest.param(
        Power(sigma_rel=0.05),
        lambda n: (1 - 1 / (n + 1)) ** (largest_root(0.05) + 1),
        id="edm2 narrow",
    ),
    pytest.param(
        Power(sigma_rel=0.25),
        lambda n: (1 - 1 / (n + 1)) ** (largest_root(0.25) + 1),
        id="edm2 wide",
    ),
]

EXAMPLES = [reference.values[0] for reference in REFERENCES]


@pytest.mark.parametrize(("schedule", "reference"), REFERENCES)
def test_formula(schedule, reference):
    """Each schedule is its source's formula at steps from 1 to 100,000, and 0 for the copy."""
    steps = np.r_[1:2000, 2000:100_001:97]

    ours = np.array([schedule(n) for n in steps.tolist()])

    assert np.abs(ours - reference(steps.astype(np.float64))).max() <= 1e-12
    assert schedule(0) == 0.0
    assert schedule(-5) == 0.0


@for_each("k", [1, 10])
@for_each("schedule", [*EXAMPLES, Custom(lambda n: n / (n + 2)), PerUpdate(0.9)], ids=repr)
def test_an_average_has_the_weights_of_the_profile(schedule, k):
    """An EMA mixes the models of its updates with just the weights that `profile` tells."""
    model = model_of(0.0, torch.float64)
    ema = modkit.EMA(model, schedule=schedule, update_every=k)
    values = torch.randn(30 * k + 1, generator=torch.Generator().manual_seed(0)).double()
    for value in values.tolist():
        set_to(model, value)
        ema.update()

    weights = torch.tensor(profile(schedule, 30 * k + k - 1, update_every=k), dtype=torch.float64)

    assert averaged(ema).item() == pytest.approx(float(weights @ values[::k]), rel=1e-12)


@for_each("sigma_rel", [1e-4, 0.003, 0.05, 0.1, 0.2, 0.28, 0.2886])
def test_exponent_of_width(sigma_rel):
    """The exponent is the largest real root of EDM2's cubic, and leads back to the width."""
    gamma = schedules.gamma_of(sigma_rel)

    assert gamma == pytest.approx(largest_root(sigma_rel), rel=1e-12, abs=1e-12)
    assert schedules.sigma_rel_of(gamma) == pytest.approx(sigma_rel, rel=1e-12)


def test_width_of_known_exponents():
    """Exponent 0 is the equal average, of width 12 ** -0.5; the width of 1 is that of a triangle."""
    assert schedules.sigma_rel_of(0) == pytest.approx(1 / math.sqrt(12))
    assert schedules.sigma_rel_of(1) == pytest.approx(1 / math.sqrt(18))


def test_large_steps_are_exact():
    """At a million steps, the formula still has the digits that matter: those of 1 - decay."""
    n = 10**6
    exact = 1 - Fraction(n, n + 1)

    assert 1 - Equal()(n) == pytest.approx(float(exact), rel=1e-9)
    assert 1 - InverseGamma(power=1.0, decay=1.0)(n) == pytest.approx(float(exact), rel=1e-9)


def test_functions():
    """Any callable is a schedule; its result must be a decay."""
    schedule = schedules.as_schedule(lambda n: 1 - 0.5**n)

    assert [schedule(n) for n in (0, 1, 2)] == [0.0, 0.5, 0.75]
    assert schedule.over(2, 2) == 0.375
    with pytest.raises(ValueError, match=r"the decay of step 3 must be .* got 2\.0"):
        Custom(lambda n: 2.0)(3)


@for_each("inner", EXAMPLES, ids=repr)
def test_decay_per_update(inner):
    """PerUpdate uses the decay of the step at every interval, and survives its config."""
    schedule = PerUpdate(inner)

    assert schedule(40) == schedule.over(40, 1) == schedule.over(40, 10) == inner(40)
    assert schedule.over(3, 4) == 0.0
    assert schedules.from_config(schedule.to_config()) == schedule


@dataclasses.dataclass(frozen=True)
class CosineRamp(schedules.Schedule):
    """A schedule of a user, without bounds."""

    decay: float = 0.9
    ramp_steps: int = 10
    floor: "float | None" = None
    name: str = ""

    def decay_at(self, n):
        """Return the decay of a step."""
        part = (1 - math.cos(math.pi * min(1, n / self.ramp_steps))) / 2
        floor = self.floor or 0.0
        return floor + (self.decay - floor) * part


NUMBER = "must be a number, a schedule or a function of the step"
CLASSES = (
    "Schedules are instances of the classes in modkit.schedules: Constant, CountWarmup, Equal, "
    "InverseGamma, PerUpdate, Power"
)
REFUSED = [
    (lambda: Constant(1.5), "Constant: decay must be from 0 to 1, got 1.5"),
    (lambda: Constant(-0.1), "Constant: decay must be from 0 to 1, got -0.1"),
    (lambda: Constant(math.nan), "Constant: decay must be from 0 to 1, got nan"),
    (lambda: InverseGamma(inv_gamma=0), "InverseGamma: inv_gamma must be above 0, got 0"),
    (lambda: InverseGamma(power=-2), "InverseGamma: power must be above 0, got -2"),
    (lambda: CountWarmup(min_decay=2), "CountWarmup: min_decay must be from 0 to 1, got 2"),
    (lambda: CountWarmup(offset=0), "CountWarmup: offset must be 1 or more, got 0"),
    (lambda: Power(0.3), "Power: sigma_rel must be above 0 and below 0.2886, got 0.3"),
    (lambda: schedules.gamma_of(0.3), "sigma_rel must be above 0 and below 0.2886, got 0.3"),
    (lambda: schedules.sigma_rel_of(-1), "gamma must be 0 or more, got -1"),
    (lambda: Constant(0.5).over(3, 0), "Constant: k must be 1 or more, got 0"),
]
REFUSED_TYPES = [
    (lambda: Constant("0.9"), "Constant: decay must be a number, got '0.9'"),
    (lambda: Constant(True), "Constant: decay must be a number, got True"),
    (lambda: Power([0.1]), "Power: sigma_rel must be a number, got [0.1]"),
    (lambda: Custom(0.9), "Custom: function must be a function of n, got 0.9"),
    (lambda: Custom(Equal), f"Custom: function must be a function of n, got {Equal!r}"),
    (lambda: PerUpdate("0.9"), f"PerUpdate: schedule {NUMBER}, got '0.9'. {CLASSES}"),
    (lambda: PerUpdate(Equal), f"PerUpdate: schedule {NUMBER}, got {Equal!r}. {CLASSES}"),
    (lambda: profile("0.9", 3), f"profile: decay {NUMBER}, got '0.9'. {CLASSES}"),
]


@for_each(
    ("error", "make", "text"),
    [
        *((ValueError, make, text) for make, text in REFUSED),
        *((TypeError, make, text) for make, text in REFUSED_TYPES),
    ],
)
def test_refused_arguments(error, make, text):
    """The error has the class, the argument and the value."""
    with pytest.raises(error) as raised:
        make()

    assert str(raised.value) == text


@for_each(
    ("config", "error", "text"),
    [
        (Custom(random.random).to_config(), ValueError, "no schedule to make from"),
        (
            {"name": "Constant", "momentum": 0.1},
            TypeError,
            "unexpected keyword argument 'momentum'",
        ),
    ],
)
def test_configs_without_a_schedule(config, error, text):
    """A function is not in its config, and numbers must be those of the class."""
    with pytest.raises(error, match=text):
        schedules.from_config(config)


def test_fields_of_other_classes_are_plain_numbers():
    """Whole numbers become int, other numbers float, and the rest stays as it is."""
    schedule = CosineRamp(np.float32(0.5), np.int64(4), name="slow")

    assert schedule.to_config() == {
        "name": "slow",
        "decay": 0.5,
        "ramp_steps": 4,
    }
    assert type(schedule.decay) is float
    assert type(schedule.ramp_steps) is int


@pytest.mark.parametrize("k", [1, 3])
def test_decays_out_of_range_are_refused(k):
    """A decay that would make an average diverge is an error with the class, the step and the value."""
    schedule = CosineRamp(decay=0.9, ramp_steps=-5, floor=7.0)
    text = (
        r"CosineRamp\(decay=0.9, ramp_steps=-5.*the decay of step \d must be between 0 and 1, got "
    )

    for call in (lambda: schedule(3), lambda: schedule.over(3, k)):
        with pytest.raises(ValueError, match=text):
            call()
    with pytest.raises(ValueError, match=r"of step 1 .* got nan"):
        schedules.as_schedule(lambda n: math.nan)(1)


@pytest.mark.parametrize("decay", [0.0, 1.0])
def test_the_ends_of_the_range_are_decays(decay):
    """A decay of 0 copies the model, and one of 1 keeps the average."""
    for schedule in (Constant(decay), schedules.as_schedule(lambda n: decay)):
        found = [schedule(3), schedule.over(3, 2)]

        assert found == [decay, decay]


@for_each(("n", "update_every"), [(-1, 1), (10, 0), (10, -2)])
def test_profile_of_too_few_steps(n, update_every):
    """Invalid numbers of steps are refused with both values."""
    with pytest.raises(ValueError, match=rf"n={n} and update_every={update_every}"):
        profile(0.9, n, update_every)


@for_each(
    "schedule",
    [*EXAMPLES, Custom(lambda n: n / (n + 3))],
    ids=[*map(repr, EXAMPLES), "Custom"],
)
@for_each(("n", "k"), [(1, 1), (7, 3), (10, 10), (1000, 100), (99_999, 7)])
def test_decay_of_several_steps(schedule, n, k):
    """The decay of k steps together is the product of their decays, except that Equal counts models."""
    product = math.prod(schedule(step) for step in range(n - k + 1, n + 1))

    together = schedule.over(n, k)

    assert together == pytest.approx(
        n / (n + k) if isinstance(schedule, Equal) else product, rel=1e-12
    )
