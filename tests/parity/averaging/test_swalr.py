import math
import warnings

import pytest
import torch

from tests.cases import for_each
from tests.helpers import Implementation, same
from tests.models import one_weight


CURVES = {"cos": lambda t: (1 - math.cos(math.pi * t)) / 2, "linear": lambda t: t}


def optimizer(lr=0.5, **group) -> torch.optim.Optimizer:
    """Return an optimizer of one parameter, which has a gradient of zero."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    return torch.optim.SGD([{"params": [parameter], **group}], lr=lr)


def rates(scheduler, count: int) -> list[float]:
    """Step the schedule and return the learning rates of the first group."""
    found = []
    for _ in range(count):
        scheduler.optimizer.step()
        scheduler.step()
        found.append(float(scheduler.optimizer.param_groups[0]["lr"]))
    return found


def test_swalr_is_a_scheduler_of_torch(impl: Implementation) -> None:
    """Code that expects a learning-rate scheduler accepts it, and torch's class is recognized."""
    scheduler = impl.SWALR(optimizer(), swa_lr=0.1)

    assert isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler)
    assert isinstance(scheduler, torch.optim.swa_utils.SWALR)


@for_each("strategy", CURVES)
@for_each("epochs", [1, 4, 10])
def test_learning_rate_is_annealed_along_the_curve(impl, strategy: str, epochs: int) -> None:
    """The rate goes from the old value to swa_lr on the chosen curve, and stays there."""
    scheduler = impl.SWALR(optimizer(0.5), 0.1, anneal_epochs=epochs, anneal_strategy=strategy)
    parts = [CURVES[strategy](min(1.0, step / epochs)) for step in range(1, epochs + 4)]

    assert rates(scheduler, epochs + 3) == pytest.approx([0.5 + (0.1 - 0.5) * p for p in parts])


def test_default_is_a_cosine_over_ten_epochs(impl: Implementation) -> None:
    """Without further arguments, ten epochs of cosine annealing lead to swa_lr."""
    plain = impl.SWALR(optimizer(), swa_lr=0.1)
    spelled = impl.SWALR(optimizer(), swa_lr=0.1, anneal_epochs=10, anneal_strategy="cos")

    assert rates(plain, 12) == rates(spelled, 12)


def test_no_annealing_takes_the_rate_at_once(impl: Implementation) -> None:
    """With anneal_epochs=0 the rate is swa_lr from the construction on."""
    scheduler = impl.SWALR(optimizer(0.5), swa_lr=0.1, anneal_epochs=0)

    assert scheduler.get_last_lr() == [0.1]
    assert rates(scheduler, 3) == [0.1] * 3


def test_each_group_may_have_its_rate(impl: Implementation) -> None:
    """A list of rates is spread over the parameter groups."""
    sgd = optimizer(0.5)
    sgd.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))], "lr": 0.8})
    scheduler = impl.SWALR(sgd, swa_lr=[0.1, 0.2], anneal_epochs=2, anneal_strategy="linear")
    sgd.step()
    scheduler.step()

    assert scheduler.get_last_lr() == pytest.approx([0.3, 0.5])
    assert [group["swa_lr"] for group in sgd.param_groups] == [0.1, 0.2]


@for_each(
    "arguments",
    [
        {"anneal_strategy": "exponential"},
        {"anneal_epochs": -1},
        {"anneal_epochs": 2.0},
        {"anneal_epochs": "ten"},
        {"swa_lr": [0.1, 0.2]},
    ],
    ids=str,
)
def test_bad_arguments_are_refused(arguments) -> None:
    """Unknown strategies, negative or fractional epochs and lists of a wrong length raise."""
    result = same(lambda impl: impl.SWALR(optimizer(), **{"swa_lr": 0.1, **arguments}))

    assert result[:2] == ("raised", "ValueError")


@pytest.mark.parametrize("strategy", CURVES)
def test_documented_chain_of_schedules(impl: Implementation, strategy: str) -> None:
    """Another schedule runs first; from the start of averaging on SWALR takes over its rate."""
    sgd = optimizer(0.5)
    scheduler = torch.optim.lr_scheduler.MultiplicativeLR(sgd, lr_lambda=lambda epoch: 0.9)
    swa_scheduler = impl.SWALR(sgd, 0.05, anneal_epochs=4, anneal_strategy=strategy)
    found = [float(rate) for rate in rates(scheduler, 3) + rates(swa_scheduler, 6)]
    start = 0.5 * 0.9**3
    parts = [CURVES[strategy](min(1.0, step / 4)) for step in range(1, 7)]

    assert found[:3] == pytest.approx([0.45, 0.405, 0.3645])
    assert found[3:] == pytest.approx([start + (0.05 - start) * part for part in parts])


def test_tensor_rates_are_annealed(impl: Implementation) -> None:
    """A learning rate that is a tensor stays one, and goes to a tensor swa_lr."""
    sgd = torch.optim.SGD(one_weight(impl).parameters(), lr=torch.tensor(0.5))
    scheduler = impl.SWALR(sgd, swa_lr=torch.tensor(0.1), anneal_epochs=2)

    assert rates(scheduler, 3) == pytest.approx([0.3, 0.1, 0.1])
    assert isinstance(sgd.param_groups[0]["lr"], torch.Tensor)


@pytest.mark.skipif(
    "state_dict" not in vars(torch.optim.swa_utils.SWALR),
    reason="this torch puts a function into the state",
)
@pytest.mark.parametrize("strategy", CURVES)
def test_schedule_continues_from_its_state(impl: Implementation, strategy: str, tmp_path) -> None:
    """A schedule loaded with weights_only=True goes on as the one that was saved."""
    settings = {"swa_lr": 0.1, "anneal_epochs": 6, "anneal_strategy": strategy}
    scheduler = impl.SWALR(optimizer(0.5), **settings)
    rates(scheduler, 2)
    torch.save([scheduler.state_dict(), scheduler.optimizer.state_dict()], tmp_path / "state.pt")
    state, optimizer_state = torch.load(tmp_path / "state.pt", weights_only=True)
    resumed = impl.SWALR(optimizer(0.5), swa_lr=0.3)
    resumed.load_state_dict(state)
    resumed.optimizer.load_state_dict(optimizer_state)

    assert rates(resumed, 5) == rates(scheduler, 5)
    assert "optimizer" not in state


def test_reading_the_rate_outside_of_a_step_warns(impl: Implementation) -> None:
    """get_lr belongs to step; called by itself it warns and names get_last_lr."""
    scheduler = impl.SWALR(optimizer(), swa_lr=0.1)

    with pytest.warns(UserWarning, match="get_last_lr"):
        scheduler.get_lr()


def test_step_before_the_optimizer_warns(impl: Implementation) -> None:
    """As with every scheduler, stepping before the optimizer's first step warns."""
    scheduler = impl.SWALR(optimizer(), swa_lr=0.1)

    with pytest.warns(UserWarning, match="lr_scheduler.step"):
        scheduler.step()


def test_schedule_can_start_late(impl: Implementation) -> None:
    """With last_epoch and the groups' initial rates, a schedule starts in the middle."""
    sgd = optimizer(0.5, initial_lr=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler = impl.SWALR(sgd, swa_lr=0.1, anneal_epochs=4, last_epoch=1)

    assert scheduler.last_epoch == 2
    assert scheduler.base_lrs == [0.5]
