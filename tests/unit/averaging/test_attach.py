import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import modkit
from tests.cases import for_each
from tests.helpers import freeze
from tests.unit.averaging.recipes import averaged, gradients, model_of, network, set_to, sgd


def two_parts() -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.Optimizer]:
    """Return a model, an optimizer of its first layer, and one of its last."""
    net = network()
    return net, sgd(net[0]), sgd(net[1], net[3])


# --- one optimizer ---------------------------------------------------------------------------------


REFUSED: dict[str, Any] = {
    "twice in a call": lambda net: [sgd(net)] * 2,
    "of another model": lambda net: [sgd(network())],
    "of a copy": lambda net: [sgd(copy.deepcopy(net))],
    "one of several": lambda net: [sgd(net[0]), sgd(net[3]), sgd(network())],
}


@for_each("kind", REFUSED)
def test_refused_optimizers_are_not_attached(kind: str) -> None:
    """The call is a ValueError that names EMA, and no step of these optimizers counts."""
    net = network()
    ema = modkit.EMA(net)
    optimizers = REFUSED[kind](net)
    with pytest.raises(ValueError, match="EMA"):
        ema.attach(*optimizers)
    gradients(net)
    for optimizer in optimizers:
        optimizer.step()

    assert ema.step == 0


def test_several_averages_and_other_parameters() -> None:
    """An optimizer serves several averages, also of parts of what it trains."""
    net = network()
    optimizer = sgd(net, nn.Linear(2, 1))
    averages = [modkit.EMA(part).attach(optimizer) for part in (net, net, net[0])]
    for number in range(3):
        gradients(net, number)
        optimizer.step()

    assert [ema.step for ema in averages] == [3, 3, 3]


def test_an_optimizer_is_attached_once() -> None:
    """Attaching it again is a ValueError that names EMA, and each step still counts once."""
    net = network()
    optimizer = sgd(net)
    ema = modkit.EMA(net).attach(optimizer)
    with pytest.raises(ValueError, match="EMA"):
        ema.attach(optimizer)
    gradients(net)
    optimizer.step()

    assert (ema.step, ema.n_averaged) == (1, 1)


# --- several optimizers ----------------------------------------------------------------------------


def test_two_optimizers_make_one_update_per_training_step() -> None:
    """The update comes after both have stepped, in either order, with the weights of that moment."""
    net, first, second = two_parts()
    attached = modkit.EMA(net, decay=0.5).attach(first, second)
    by_hand = modkit.EMA(net, decay=0.5)
    steps = []
    for number, order in enumerate([(first, second), (second, first), (first, second)]):
        gradients(net, number)
        for optimizer in order:
            optimizer.step()
            steps.append(attached.step)
        by_hand.update()

    assert steps == [0, 1, 1, 2, 2, 3]
    assert freeze(dict(attached.named_averages())) == freeze(dict(by_hand.named_averages()))


@for_each(
    ("order", "expected"),
    [("aa", 1), ("aaa", 2), ("aab", 2), ("abb", 1), ("abaab", 3), ("bbab", 2)],
)
def test_a_second_step_of_one_optimizer_ends_the_training_step(order: str, expected: int) -> None:
    """Where one optimizer steps again before the other did, that is a new training step."""
    net, first, second = two_parts()
    ema = modkit.EMA(net).attach(first, second)
    gradients(net)
    for name in order:
        {"a": first, "b": second}[name].step()

    assert ema.step == expected


# --- detach ----------------------------------------------------------------------------------------


def test_detach_undoes_attach() -> None:
    """After it no step counts, and a training step that has begun is forgotten."""
    net, first, second = two_parts()
    ema = modkit.EMA(net)
    ema.detach()
    ema.attach(first, second)
    gradients(net)
    first.step()
    ema.detach()
    second.step()
    steps = [ema.step]
    ema.attach(first, second)
    for optimizer in (second, first):
        optimizer.step()
        steps.append(ema.step)

    assert steps == [0, 0, 1]


def test_a_detached_optimizer_may_step_inside_applied() -> None:
    """The guard against training the average goes with the optimizer."""
    net = network()
    optimizer = sgd(net)
    ema = modkit.EMA(net).attach(optimizer)
    ema.detach()
    ema.update()
    weight = averaged(ema, "0.weight").clone()
    with ema.applied():
        net.zero_grad()
        optimizer.step()

    assert torch.equal(averaged(ema, "0.weight"), weight)
    assert ema.step == 1


# --- parameters without data -----------------------------------------------------------------------


def unchanged(ema: "modkit.EMA[Any]") -> None:
    """Assert that an update is a RuntimeError that changes nothing."""
    before = freeze(ema.state_dict())
    counters = ema.step, ema.n_averaged
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"EMA.*meta"):
            ema.update()

    assert freeze(ema.state_dict()) == before
    assert (ema.step, ema.n_averaged) == counters


@for_each("begun", [False, True])
def test_meta_parameters_are_refused_until_they_have_data(begun: bool) -> None:
    """An average that has started keeps its values; with data it starts, or goes on."""
    model = model_of([1.0, 3.0])
    ema = modkit.EMA(model, decay=0.5)
    if begun:
        ema.update()
    model.to("meta")
    unchanged(ema)
    kept = [value.tolist() for _, value in ema.named_averages()]
    model.to_empty(device="cpu")
    for value in [3.0, 5.0], [4.0, 6.0]:
        set_to(model, value)
        ema.update()

    assert kept == ([[1.0, 3.0]] if begun else [])
    assert averaged(ema).tolist() == ([3.0, 5.0] if begun else [3.5, 5.5])
    assert ema.n_averaged == 2 + begun


# --- wrappers --------------------------------------------------------------------------------------


class Wrapper(torch.optim.Optimizer):
    """A wrapper without hooks, like accelerate's ``AcceleratedOptimizer``."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> Any:
        """The groups of the optimizer inside."""
        return self.optimizer.param_groups

    def step(self, closure: Any = None) -> Any:
        """Take the step of the optimizer inside."""
        return self.optimizer.step(closure)


class Shares(Wrapper):
    """A wrapper with the attributes of the optimizer inside, like Lightning's."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        vars(self).update({name: one for name, one in vars(optimizer).items() if name != "step"})
        self.optimizer = optimizer

    param_groups: Any = None


class Alone(Shares):
    """A wrapper with tables of hooks that nothing runs."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.inner = optimizer
        self.param_groups = optimizer.param_groups
        self._optimizer_step_pre_hooks: Any = {}
        self._optimizer_step_post_hooks: Any = {}

    def step(self, closure: Any = None) -> Any:
        """Take the step of the optimizer inside."""
        return self.inner.step(closure)


class Duck:
    """A wrapper that is not an optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups


@for_each("face", ["EMA", "EMACallback"])
@for_each("kind", [Wrapper, Alone, Duck])
def test_a_wrapper_without_hooks_is_refused(face: str, kind: Any) -> None:
    """The TypeError names the class, and says to attach the optimizer inside, if there is one."""
    net = network()
    wrapped = kind(sgd(net))
    text = r"is not a torch\.optim\.Optimizer, or does not run the hooks.*attach\(optimizer\.optimizer\)"
    end = r"\. Call update\(\) after each step otherwise\.$"
    with pytest.raises(TypeError, match=rf"EMA\.attach\(\): {kind.__name__} {text}{end}"):
        if face == "EMA":
            modkit.EMA(net).attach(wrapped)
        else:
            modkit.EMACallback(net, wrapped)


def test_a_wrapper_that_shares_the_hooks_is_attached() -> None:
    """Then the optimizer inside runs them: each step is one update."""
    net = network()
    wrapped = Shares(sgd(net))
    ema = modkit.EMA(net).attach(wrapped)
    for number in range(3):
        gradients(net, number)
        wrapped.step()

    assert ema.step == 3


# --- attach() and update() both --------------------------------------------------------------------


@for_each("given", [False, True])
def test_an_update_by_hand_after_an_attached_step_warns_once(given: bool) -> None:
    """The step counts twice, and the first of these calls says so."""
    net = network()
    optimizer = sgd(net)
    ema = modkit.EMA(net).attach(optimizer)
    arguments = [net] if given else []
    gradients(net)
    optimizer.step()
    with pytest.warns(UserWarning, match=r"already updated.*attach\(\) or update\(\)") as caught:
        ema.update(*arguments)
    for number in range(1, 3):
        gradients(net, number)
        optimizer.step()
        ema.update(*arguments)

    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert ema.n_averaged == 6


def evaluate_twice(ema: "modkit.EMA[Any]") -> None:
    """Swap the average in, twice."""
    for _ in range(2):
        with ema.applied():
            pass


@for_each("made", ["before", "after"])
def test_a_second_optimizer_that_is_not_attached(made: str) -> None:
    """Its steps do not count, of which the next evaluation warns, once."""
    net = network()
    optimizers = [sgd(net), sgd(net)]
    ema = modkit.EMA(net).attach(optimizers[0])
    if made == "after":
        gradients(net)
        optimizers[0].step()
    for number in range(12):
        gradients(net, number)
        optimizers[1].step()
    with pytest.warns(UserWarning, match=r"attach\(\) the optimizer .* made later") as caught:
        evaluate_twice(ema)

    assert len(caught) == 1
    assert ema.step == (made == "after")


def skipped(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Take a step that the scaler skips."""
    scaler = torch.amp.GradScaler("cpu")
    net.zero_grad()
    scaler.scale(net(torch.ones(2, 4)).sum() * torch.inf).backward()
    scaler.step(optimizer)


UNTRAINED: dict[str, Any] = {
    "loaded": lambda net, _: net.load_state_dict(net.state_dict()),
    "edited": lambda net, _: net[0].weight.data.clamp_(-1, 1),
    "skipped": skipped,
    "nothing": lambda *_: None,
}


@for_each("kind", UNTRAINED)
def test_what_is_not_training_is_no_second_optimizer(kind: str) -> None:
    """Evaluations, loaded weights, edits and steps that a scaler skips do not warn."""
    net = network()
    optimizer = sgd(net)
    ema = modkit.EMA(net).attach(optimizer)
    for number in range(3):
        gradients(net, number)
        optimizer.step()
        UNTRAINED[kind](net, optimizer)
        for _ in range(20):
            with ema.applied():
                pass

    assert ema.step == 3


def test_new_groups_and_copied_averages_are_not_training() -> None:
    """Groups that are added later were written to more or less often; a second optimizer still warns."""
    net = network()
    optimizer = sgd(net[3])
    ema = modkit.EMA(net, [0.5, 0.9]).attach(optimizer)
    for number, added in enumerate([*[None] * 12, net[1], net[0]]):
        gradients(net, number)
        optimizer.step()
        if added is not None:
            optimizer.add_param_group({"params": [*added.parameters()]})
        evaluate_twice(ema)
    for index, model in [(0, None), (1, net), (0, nn.DataParallel(net))] * 6:
        ema.store()
        ema.copy_to(model, index=index)
        ema.restore()
    evaluate_twice(ema)

    assert ema.step == 14
    other = sgd(net)
    for number in range(12):
        gradients(net, number)
        other.step()
    with pytest.warns(UserWarning, match="no update"):
        evaluate_twice(ema)


# --- an optimizer that gets other parameters --------------------------------------------------------


def masters(parameters: list[nn.Parameter]) -> list[nn.Parameter]:
    """Return copies of parameters, as master weights are."""
    return [nn.Parameter(parameter.detach().clone()) for parameter in parameters]


def put_flat_masters(optimizer: torch.optim.Optimizer) -> None:
    """Train one flat master weight in place of the parameters, as DeepSpeed does."""
    (group,) = optimizer.param_groups
    flat = torch.cat([parameter.detach().flatten() for parameter in group["params"]])
    group["params"] = [nn.Parameter(flat)]


def put_masters(optimizer: torch.optim.Optimizer) -> None:
    """Train a master weight in place of each parameter, as apex does."""
    for group in optimizer.param_groups:
        group["params"] = masters(group["params"])


def replace_groups(optimizer: torch.optim.Optimizer) -> None:
    """Put other groups in the place of all."""
    optimizer.param_groups[:] = []
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})


@pytest.mark.parametrize("steps_before", [0, 1])
@pytest.mark.parametrize("change", [put_flat_masters, put_masters, replace_groups])
def test_parameters_that_took_the_place_of_averaged_ones(change: Any, steps_before: int) -> None:
    """Each step is refused by name, because the model is written after it."""
    net = network()
    optimizer = sgd(net)
    ema = modkit.EMA(net).attach(optimizer)
    for _ in range(steps_before):
        gradients(net)
        optimizer.step()
    change(optimizer)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"SGD no longer holds averaged.*call update\(\)"):
            optimizer.step()

    assert ema.step == steps_before
    ema.detach()
    optimizer.step()
    ema.update()
    assert ema.step == steps_before + 1


def add_masters(optimizer: torch.optim.Optimizer) -> None:
    """Train something else, too, in front of the averaged parameters."""
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    optimizer.param_groups.reverse()


def split_groups(optimizer: torch.optim.Optimizer) -> None:
    """Give each parameter a group of its own, the last one first."""
    (group,) = optimizer.param_groups
    parameters = group["params"]
    optimizer.param_groups[:] = [{**group, "params": [one]} for one in reversed(parameters)]


def train_fewer(optimizer: torch.optim.Optimizer) -> None:
    """Leave the first parameters as they are from now on."""
    (group,) = optimizer.param_groups
    del group["params"][:2]


@pytest.mark.parametrize("change", [add_masters, split_groups, train_fewer])
def test_groups_may_change_as_long_as_averaged_parameters_train(change: Any) -> None:
    """The place of a parameter among the groups does not matter."""
    net = network()
    optimizer = sgd(net)
    ema = modkit.EMA(net).attach(optimizer)
    for number in range(4):
        gradients(net, number)
        optimizer.step()
        if number == 1:
            change(optimizer)

    assert ema.step == 4


def test_what_is_attached_is_freed_without_garbage_collection() -> None:
    """Optimizers hold their averages, and averages do not hold their optimizers."""
    net = network()
    optimizer = sgd(net)
    ema = modkit.EMA(net).attach(optimizer)
    gradients(net)
    optimizer.step()
    alive = [weakref.ref(one) for one in (net, optimizer, ema)]
    gc.disable()
    try:
        del net, ema, optimizer
        assert [reference() for reference in alive] == [None] * 3
    finally:
        gc.enable()
