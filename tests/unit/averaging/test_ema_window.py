import pytest
import torch

import modkit
from modkit.schedules import Constant, Window
from tests.cases import for_each
from tests.unit.averaging.recipes import CountCalls, averaged, model_of, set_to


def values(count: int) -> list[torch.Tensor]:
    """Return the weights of some steps."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(50, generator=generator) for _ in range(count)]


@for_each("window", [1, 2, 3, 20])
@for_each("every", [1, 3])
def test_the_mean_of_the_latest_models(window: int, every: int) -> None:
    """The average is the mean of the last models that were taken, however many there have been."""
    model = model_of(torch.zeros(50))
    ema = modkit.EMA(model, schedule=Window(window), update_every=every)
    taken = []
    for step, value in enumerate(values(12)):
        set_to(model, value)
        ema.update()
        if step % every == 0:
            taken.append(value)
        expected = torch.stack(taken[-window:]).double().mean(0)

        torch.testing.assert_close(averaged(ema).double(), expected, rtol=1e-6, atol=1e-6)


def test_a_window_beside_a_decay() -> None:
    """Averages of both kinds are what they would be alone, and no update waits for the device."""
    model = model_of(torch.zeros(50))
    together = modkit.EMA(model, schedule=[Constant(0.9), Window(4)])
    alone = [modkit.EMA(model, schedule=kind) for kind in (Constant(0.9), Window(4))]
    with CountCalls("_local_scalar_dense") as counted:
        for value in values(7):
            set_to(model, value)
            for ema in (together, *alone):
                ema.update()

    assert counted.calls == []
    for index, ema in enumerate(alone):
        assert torch.equal(averaged(together, index=index), averaged(ema))


def test_sixteen_bits_are_summed_in_more() -> None:
    """The mean of bfloat16 copies is rounded once."""
    model = model_of(torch.zeros(50), torch.bfloat16)
    ema = modkit.EMA(model, schedule=Window(8), precision="same")
    for value in values(8):
        set_to(model, value)
        ema.update()
    expected = torch.stack([value.bfloat16() for value in values(8)]).float().mean(0)

    assert torch.equal(averaged(ema), expected.bfloat16())


def test_windows_that_make_no_sense() -> None:
    """A window is a whole number, and steps cannot be taken out of it later."""
    for window in (0, -1, 2.5):
        with pytest.raises(ValueError, match=f"Window: window must be a whole number.*{window}"):
            Window(window)
    with pytest.raises(
        ValueError, match=r"on_nonfinite='skip' does not work with Window\(window=2\)"
    ):
        modkit.EMA(model_of(1.0), schedule=Window(2), on_nonfinite="skip")
