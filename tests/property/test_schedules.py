import pytest
from hypothesis import given, strategies as st

from modkit import schedules


pytestmark = pytest.mark.property

decays = st.floats(0, 1)
positive = st.floats(1e-3, 1e6)
any_schedule = st.one_of(
    st.builds(schedules.Constant, decays),
    st.builds(schedules.HalfLife, positive),
    st.builds(schedules.InverseGamma, positive, st.floats(0.01, 5), st.just(0.0), decays),
    st.builds(schedules.CountWarmup, decays, st.floats(1, 1e6)),
    st.builds(schedules.Power, st.floats(0.001, 0.288)),
    st.builds(schedules.Power, gamma=st.floats(0, 1000)),
)
steps = st.integers(0, 10**6)
few = st.integers(1, 200)


@given(any_schedule, steps, few, few)
def test_steps_together(schedule, start, first, second):
    """The decay of several steps is the product of the decays of two parts."""
    middle, end = start + first, start + first + second

    together = schedule.over(end, first + second)

    apart = schedule.over(middle, first) * schedule.over(end, second)
    assert together == pytest.approx(apart, rel=1e-9, abs=1e-300)


@given(any_schedule, steps)
def test_decays_are_fractions(schedule, n):
    """Every decay is between 0 and 1, and `over(n, 1)` equals `schedule(n)`."""
    assert 0 <= schedule(n) <= 1
    assert schedule.over(n, 1) == pytest.approx(schedule(n), rel=1e-12, abs=1e-300)


@given(any_schedule, st.integers(0, 500), few)
def test_weights_of_profile(schedule, n, k):
    """The weights of all models are fractions and add up to 1, at any interval."""
    weights = schedules.profile(schedule, n, update_every=k)

    assert len(weights) == n // k + 1
    assert min(weights) >= 0
    assert sum(weights) == pytest.approx(1)


@given(any_schedule)
def test_config(schedule):
    """A schedule with any numbers equals the one from its config."""
    assert schedules.from_config(schedule.to_config()) == schedule


@given(st.floats(1e-4, 0.2886))
def test_widths(sigma_rel):
    """`sigma_rel_of()` inverts `gamma_of()`."""
    gamma = schedules.gamma_of(sigma_rel)

    assert schedules.sigma_rel_of(gamma) == pytest.approx(sigma_rel, rel=1e-9)
