import contextlib
import io
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.integration.peers import PEERS


PAGE = Path(__file__).parents[2] / "docs" / "averaging.md"


def weight(value, dtype=torch.float32, size=1):
    """Return a parameter that holds one value."""
    return nn.Parameter(torch.full((size,), float(value), dtype=dtype))


def fill(model, value):
    """Give all parameters one value."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)


def named(**members):
    """Return a module with these parameters, in order."""
    module = nn.Module()
    for name, member in members.items():
        module.register_parameter(name, member)
    return module


def float_of(peer, name):
    """Return the mean of an averaged tensor as a number."""
    return peer.values()[name].double().mean().item()


def updates(make, model, values):
    """Make an average of the model and update it with all its parameters at each of the values."""
    peer = make(model)
    for value in values:
        fill(model, value)
        peer.update()
    return peer


def tied_weights_are_averaged_once(make):
    """A weight with two names has the average that it would have with one."""
    tied = named(a=weight(1))
    tied.b = tied.a
    values = [1, 1, 0]

    both = updates(make, tied, values)

    return float_of(both, "a") == pytest.approx(
        float_of(updates(make, named(a=weight(1)), values), "a")
    )


def counters_of_layers_follow_the_model(make):
    """The number of batches that batch normalization has seen is the model's, also in the average."""
    model = nn.BatchNorm1d(2)
    peer = make(model)
    for _ in range(5):
        model(torch.randn(4, 2))
        peer.update()

    counter = peer.values().get("num_batches_tracked")
    return counter is not None and counter.item() == 5


def bfloat16_models_are_averaged_precisely(make):
    """The average of a bfloat16 model goes where that of a float32 model goes, within two percent."""
    values = [1.0] * 100 + [2.0] * 300

    def end(dtype):
        peer = updates(
            lambda model: make(model, decay=0.995), named(a=weight(1, dtype, 4096)), values
        )
        return float_of(peer, "a")

    torch.manual_seed(0)
    return end(torch.bfloat16) == pytest.approx(end(torch.float32), abs=0.02)


def updates_read_no_values(make):
    """An update reads no tensor's value on the host, which would make a GPU wait."""
    reads = []

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.name() == "aten::_local_scalar_dense":
                reads.append(func)
            return func(*args, **(kwargs or {}))

    peer = updates(make, nn.Linear(2, 2), [1, 1, 1])
    with Count():
        peer.update()
    return not reads


def saved_averages_find_parameters_by_name(make):
    """A state loads into a model that defines the same parameters in another order, or is refused."""
    saved = make(named(a=weight(1), b=weight(2)))
    saved.update()
    loaded = make(named(b=weight(0), a=weight(0)))
    try:
        loaded.load_state_dict(saved.state_dict())
    except (ValueError, RuntimeError):
        return True
    return float_of(loaded, "a") == 1


def state_holds_the_decay(make):
    """What goes on from a saved state has the decay that was in use, not the one it was made with."""

    def run(decay_of_rest):
        model = named(a=weight(1))
        peer = make(model, decay=0.05)
        for value in (1, 1, 0):
            fill(model, value)
            peer.update()
        resumed = make(model, decay=decay_of_rest)
        resumed.load_state_dict(peer.state_dict())
        fill(model, 1)
        resumed.update()
        return float_of(resumed, "a")

    return run(0.05) == pytest.approx(run(0.01), abs=1e-9)


def state_is_read_with_weights_only(make):
    """The state goes through `torch.save` and through `torch.load` with `weights_only=True`."""
    file = io.BytesIO()
    peer = updates(make, named(a=weight(1)), [1, 1])
    torch.save(peer.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    return loaded.keys() == peer.state_dict().keys()


def swaps_nest(make):
    """Inside two swaps and after them, the model has the right weights."""
    model = named(a=weight(1))
    peer = updates(make, model, [1, 1, 0])
    average = float_of(peer, "a")
    with peer.swapped():
        with peer.swapped():
            inner = model.a.item()
        outer = model.a.item()
    return (inner, outer, model.a.item()) == (pytest.approx(average), pytest.approx(average), 0)


def models_that_deepcopy_refuses(make):
    """A model that keeps a tensor of its last graph, as many cache, can be averaged."""
    model = named(a=weight(1))
    model.cache = model.a * 2
    # ema-pytorch prints and ends the process where it cannot copy.
    with contextlib.suppress(RuntimeError, SystemExit), contextlib.redirect_stdout(io.StringIO()):
        return float_of(updates(make, model, [1, 1]), "a") == 1
    return False


def lazy_modules(make):
    """An average that is made before the first forward follows the parameters that then appear."""
    model = nn.LazyLinear(1)
    try:
        peer = make(model)
        model(torch.zeros(1, 2))
        for value in (1, 1):
            fill(model, value)
            peer.update()
    except (RuntimeError, ValueError):
        return False
    return float_of(peer, "bias") == 1


FEATURES = {
    "a tied weight is averaged once": tied_weights_are_averaged_once,
    "counters of layers follow the model": counters_of_layers_follow_the_model,
    "a bfloat16 model is averaged precisely": bfloat16_models_are_averaged_precisely,
    "an update reads no value on the host": updates_read_no_values,
    "a saved average finds its parameters by name": saved_averages_find_parameters_by_name,
    "the state holds the decay": state_holds_the_decay,
    "the state loads with `weights_only=True`": state_is_read_with_weights_only,
    "swaps in a `with` block nest": swaps_nest,
    "models that `deepcopy` refuses": models_that_deepcopy_refuses,
    "lazy modules": lazy_modules,
}


def cells():
    """Return the feature, the library and the mark of each cell of the table in the documentation."""
    page = PAGE.read_text(encoding="utf-8")
    table = re.search(r"^\| feature \|.*\n(?:\|.*\n)+", page, re.MULTILINE)[0]
    head, _, *rows = (
        [cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()
    )
    return [(row[0], head[i], row[i]) for row in rows for i in range(1, len(head))]


@pytest.mark.parametrize(
    ("feature", "library", "mark"),
    [pytest.param(*cell, id=f"{cell[0]}, {cell[1]}") for cell in cells()],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_cell(feature, library, mark):
    """A cell of the table says yes or no as the library does here; a dash stands where it offers none."""
    make, probe = PEERS[library], FEATURES[feature]
    if mark == "-":
        assert probe is swaps_nest
        assert not hasattr(make, "swapped")
        return
    try:
        outcome = probe(make)
    except ModuleNotFoundError as error:
        pytest.skip(f"could not import {error.name or error}")

    assert mark == ("yes" if outcome else "no")


def test_table_is_complete():
    """The table has every feature that is probed, and every library."""
    assert {(feature, library) for feature, library, _ in cells()} == {
        (feature, library) for feature in FEATURES for library in PEERS
    }
