import copy
import io

import pytest
import torch
from torch import nn

import modkit
from tests.cases import for_each
from tests.unit.averaging.recipes import (
    PRECISIONS,
    averaged,
    model_of,
    network,
    same_state,
    set_to,
    state_of,
)


def loop(steps: int = 3, **options):
    """Return a network that has taken some steps, its optimizer and its callback."""
    net = network()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
    ema = modkit.EMACallback(net, optimizer, decay=0.9, **options)
    for step in range(steps):
        batch_of(net, step)
        optimizer.step()
        optimizer.zero_grad()
    return net, optimizer, ema


def batch_of(net: nn.Module, step: int) -> None:
    """Add the gradient of the batch that belongs to a step."""
    batch = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
    net(batch).square().mean().backward()


def averages(ema) -> list[torch.Tensor]:
    """Return copies of all averages of a callback."""
    count = range(len(ema.ema.schedules))
    return [value.clone() for i in count for _, value in ema.ema.named_averages(i)]


def equal(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    """Return True if two lists of tensors are bitwise identical."""
    return all(map(torch.equal, first, second)) and len(first) == len(second) > 0


def test_an_optimizer_counts_each_step_once() -> None:
    """Calls of the hooks add nothing, and accumulated batches are one step."""
    net, optimizer, ema = loop(0)
    for batch in range(6):
        ema.on_train_batch_start(batch)
        batch_of(net, batch)
        if batch % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
            ema.step()
        ema.on_train_batch_end("outputs", batch_idx=batch)

    assert ema.ema.step == ema.ema.n_averaged == 2


@pytest.mark.parametrize("name", ["step", "on_train_batch_end"])
def test_without_an_optimizer_the_loop_says_when(name) -> None:
    """Each call of the hook is one update, with the weights that EMA would have."""
    model, reference = model_of([8.0]), model_of([8.0])
    ema, plain = modkit.EMACallback(model, decay=0.5), modkit.EMA(reference, decay=0.5)
    for value in 4.0, 2.0:
        set_to(model, value)
        set_to(reference, value)
        getattr(ema, name)()
        plain.update()

    assert ema.ema.n_averaged == 2
    assert averaged(ema.ema).item() == averaged(plain).item() == 3.0


def test_the_block_evaluates_the_average() -> None:
    """Inside are the average and evaluation mode; after it the weights and the modes are as before."""
    net, _, ema = loop()
    net[1].eval()
    before = state_of(net)
    with ema.evaluating() as model:
        inside = averaged(ema.ema, "0.weight").equal(net[0].weight)
        modes = {module.training for module in model.modules()}

    assert model is net
    assert inside
    assert modes == {False}
    assert same_state(net, before)
    assert [module.training for module in net] == [True, False, True, True]


def two_averages(value: float = 8.0):
    """Return a model with one weight and a callback: averages 2.0 and 4.0, and the weight 8.0."""
    model = model_of([0.0])
    model.register_buffer("calls", torch.tensor(0))
    ema = modkit.EMACallback(model, decay=[0.75, 0.5])
    for weight in 0.0, value:
        set_to(model, weight)
        ema.step()
    return model, ema


@pytest.mark.parametrize("inference", [False, True])
def test_the_training_weights_and_each_average_in_one_validation(inference) -> None:
    """Blocks nest in each other and in the hooks, each with its own weights."""
    model, ema = two_averages()
    seen = []

    def look() -> None:
        seen.append((model.weight.item(), model.training))

    with torch.inference_mode(inference):
        with ema.evaluating_training_weights():
            look()
        ema.on_validation_start()
        look()
        with ema.evaluating_training_weights():
            look()
            with ema.evaluating(index=1):
                look()
            look()
        look()
        ema.on_validation_end()
        look()
        with ema.evaluating(index=1):
            ema.on_validation_start()
            look()
        ema.on_validation_end()
    set_to(model, 16.0)
    model.weight.sum().backward()
    ema.step()

    in_order = [(8, False), (2, True), (8, False), (4, False), (8, False), (2, True), (8, True)]
    assert seen == [*in_order, (4, False)]
    assert [averaged(ema.ema, index=index).item() for index in (0, 1)] == [5.5, 10.0]


def test_a_copied_buffer_that_is_written_to_among_the_training_weights() -> None:
    """The training weights' block may write to it; the evaluation around it warns."""
    model, ema = two_averages()
    ema.on_validation_start()
    with ema.evaluating_training_weights():
        model.calls += 1
    with pytest.warns(UserWarning, match="EMA: calls, a buffer that is copied with the average"):
        ema.on_validation_end()

    assert (model.weight.item(), model.calls.item()) == (8.0, 1)


@for_each("error", [KeyError, KeyboardInterrupt])
@for_each("block", ["evaluating", "evaluating_training_weights"])
def test_an_error_in_a_block(block, error) -> None:
    """The evaluation around it goes on with its average, and training as if nothing had been."""
    net, optimizer, ema = loop()
    ema.on_validation_start()
    inside = state_of(net)
    with pytest.raises(error), getattr(ema, block)():
        raise error
    goes_on = same_state(net, inside)
    ema.on_validation_end()
    batch_of(net, 3)
    optimizer.step()

    assert goes_on
    assert net.training
    assert averages_and_weights(net, ema) == averages_and_weights(*loop(4)[::2])


def test_before_the_first_update_the_raw_weights_are_evaluated() -> None:
    """There is no average yet, and the untrained copy is not taken for one."""
    net, _, ema = loop(2, update_after_step=10)
    before = state_of(net)
    with ema.evaluating():
        in_block = same_state(net, before)
    ema.on_validation_start()
    in_hooks = same_state(net, before)
    ema.on_validation_end()

    assert in_block
    assert in_hooks
    assert same_state(net, before)


def averages_and_weights(net: nn.Module, ema) -> list[list[float]]:
    """Return all numbers of a run, to compare them with those of another one."""
    return [value.tolist() for value in (*state_of(net).values(), *averages(ema))]


@pytest.mark.parametrize("kind", ["validation", "test", "predict"])
def test_hooks_put_the_average_in_and_out(kind) -> None:
    """Starting twice is idempotent for each kind of evaluation, and an end without a start has no effect."""
    net, _, ema = loop()
    before = state_of(net)
    ema.on_validation_end()
    at_first = same_state(net, before)
    for _ in range(2):
        getattr(ema, f"on_{kind}_start")("trainer", "module")
    inside = averaged(ema.ema, "0.weight").equal(net[0].weight)
    getattr(ema, f"on_{kind}_end")("trainer", "module")
    after = same_state(net, before)
    ema.on_validation_end()

    assert at_first
    assert inside
    assert after
    assert same_state(net, before)


@pytest.mark.parametrize("swaps", [False, True])
def test_the_average_can_be_the_model_at_the_end(swaps) -> None:
    """It is copied if it is wanted, a checkpoint still resumes the training, and a second end is harmless."""
    net, _, ema = loop(swap_to_average_at_end=swaps)
    before = state_of(net)
    ema.on_train_end("trainer")
    ema.on_train_end()
    copied = averaged(ema.ema, "0.weight").equal(net[0].weight)
    state = copy.deepcopy(ema.state_dict())

    assert copied is swaps
    assert same_state(net, before) is not swaps
    if swaps:
        other = network()
        with pytest.warns(UserWarning, match="its training weights are loaded into the model"):
            modkit.EMACallback(other, decay=0.9).load_state_dict(state)
        with pytest.raises(RuntimeError, match=r"between copy_to\(\) and restore\(\)"):
            ema.ema.update()
        ema.ema.restore()

        assert same_state(other, before)
        assert same_state(net, before)


PLACES = ["between steps", "in the block", "between the hooks"]


def trained(*, precision, accumulate, save_at=None, place=None, resume=None):
    """Train for twelve batches; save after one of them, or go on from what was saved then."""
    net = network()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
    schedule = [0.9, modkit.schedules.CountWarmup(0.99)]
    options = {"schedule": schedule, "precision": precision, "update_every": 2, "index": 1}
    ema = modkit.EMACallback(net, optimizer, **options)
    first, saved = 0, io.BytesIO()
    if resume is not None:
        resume.seek(0)
        checkpoint = torch.load(resume, weights_only=True)
        net.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        ema.load_state_dict(checkpoint["ema"])
        first = checkpoint["batches"]
    for batch in range(first, 12):
        batch_of(net, batch)
        if batch % accumulate == accumulate - 1:
            optimizer.step()
            optimizer.zero_grad()
        ema.on_train_batch_end()
        if batch + 1 == save_at:
            states = {"model": net, "optimizer": optimizer, "ema": ema}
            save(saved, states, batch + 1, place)
    return averages_and_weights(net, ema), saved


def save(file, states, batches, place) -> None:
    """Write a checkpoint in one of the places of a loop."""

    def write() -> None:
        found = {name: one.state_dict() for name, one in states.items()}
        torch.save({**found, "batches": batches}, file)

    ema = states["ema"]
    if place == "in the block":
        with torch.inference_mode(), ema.evaluating():
            write()
    elif place == "between the hooks":
        ema.on_validation_start()
        write()
        ema.on_validation_end()
    else:
        write()


@pytest.mark.filterwarnings("ignore:EMA. the state was saved inside applied:UserWarning")
@for_each("precision", PRECISIONS)
@for_each(("accumulate", "place"), zip((1, 2, 2), PLACES, strict=True))
def test_resuming_is_as_not_stopping(accumulate, place, precision) -> None:
    """Wherever it was saved, the resumed run ends in the bits of the one that went through."""
    options = {"precision": precision, "accumulate": accumulate}
    through, _ = trained(**options)
    for steps in 1, 5:
        saving, file = trained(save_at=steps * accumulate, place=place, **options)
        resumed, _ = trained(resume=file, **options)

        assert saving == through
        assert resumed == through
