"""Features of weight-averaging libraries: each function returns True if a library's average has it.

A function takes a class of `tests.integration.averaging_peers.peers`. `docs/render.py --renew averaging_libraries` stores
all outcomes.
"""

import contextlib
import io
import tempfile

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.integration.averaging_peers.peers import PEERS
from tests.integration.pages import answer


REFUSALS = (RuntimeError, ValueError, AssertionError)


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


def float_of(peer, name="a"):
    """Return the mean of an averaged tensor as a number."""
    return peer.values()[name].double().mean().item()


def close(first, second, tolerance=1e-6):
    """Return True if two numbers are equal within the tolerance."""
    return abs(first - second) <= tolerance


def updated(peer, *values):
    """Update the average with all parameters of its model at each of the values."""
    for value in values:
        fill(peer.model, value)
        peer.update()
    return peer


@contextlib.contextmanager
def refusable():
    """Suppress the errors with which a library refuses a model.

    ema-pytorch prints and ends the process where it cannot copy.
    """
    with (
        contextlib.suppress(SystemExit, *REFUSALS),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        yield


class Calls(TorchDispatchMode):
    """Collects the names of the operators that run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name().removeprefix("aten::").partition(".")[0])
        return func(*args, **(kwargs or {}))


# Averaged tensors.


def tied_weights(make):
    """A weight with two names has the average that it would have with one."""
    tied = named(a=weight(1))
    tied.b = tied.a
    both, one = updated(make(tied), 1, 1, 0), updated(make(named(a=weight(1))), 1, 1, 0)
    return close(float_of(both), float_of(one))


def several_averages(make):
    """One object keeps averages with two decays."""
    peer = updated(make(named(a=weight(1)), decays=[0.5, 0.75]), 0, 1)
    return [peer.values_of(index)["a"].item() for index in range(2)] == [0.5, 0.25]


def trainable_only(make):
    """The average holds the parameters that require gradients, and no others."""
    model = named(a=weight(1), b=weight(1))
    model.b.requires_grad_(False)
    peer = make(model, trainable_only=True)
    peer.update()
    return [*peer.values()] == ["a"]


def buffer_policies(make):
    """Buffers are copied or averaged, as an option says."""
    found = []
    for average_buffers in (False, True):
        model = nn.BatchNorm1d(1)
        peer = make(model, average_buffers=average_buffers)
        for value in (0.0, 0.0, 1.0):
            model.running_mean.fill_(value)
            peer.update()
        value = peer.values().get("running_mean", torch.zeros(1)).item()
        found.append(value)
    return found[0] == 1 and 0 < found[1] < 1


def buffer_policies_by_name(make):
    """One buffer is copied while another one is averaged."""
    model = nn.BatchNorm1d(1)
    peer = make(model, copy_by_name=["running_mean"])
    for value in (0.0, 0.0, 1.0):
        model.running_mean.fill_(value)
        model.running_var.fill_(value)
        peer.update()
    values = peer.values()
    return values["running_mean"].item() == 1 and 0 < values["running_var"].item() < 1


def integer_buffers(make):
    """The number of batches that batch normalization has seen is the model's, also in the average."""
    model = nn.BatchNorm1d(2)
    peer = make(model)
    for _ in range(5):
        model(torch.randn(4, 2))
        peer.update()
    counter = peer.values().get("num_batches_tracked")
    return counter is not None and counter.item() == 5


def bfloat16(make):
    """The average of a bfloat16 model goes where that of a float32 model goes, within two percent."""
    values = [1.0] * 100 + [2.0] * 300

    def end(dtype):
        return float_of(updated(make(named(a=weight(1, dtype, 4096)), 0.995), *values))

    torch.manual_seed(0)
    return close(end(torch.bfloat16), end(torch.float32), 0.02)


def nonfinite(make):
    """An update whose weights are not finite leaves the average as it is, if an option says so."""
    peer = updated(make(named(a=weight(1)), skip_nonfinite=True), 1, 1, float("nan"))
    return float_of(peer) == 1


# How the average is updated.


def host_reads(make):
    """An update reads no tensor's value on the host, which would synchronize with a device."""
    peer = updated(make(nn.Linear(2, 2)), 1, 1, 1)
    with Calls() as calls:
        peer.update()
    return "_local_scalar_dense" not in calls.names


def update_every(make):
    """The average changes at every third update only."""
    peer = make(named(a=weight(1)), update_every=3)
    found = [float_of(updated(peer, value)) for value in range(1, 8)]
    return len(set(found)) == 3


def update_after_step(make):
    """The update after the first three copies the weights, and the next one averages."""
    peer = updated(make(named(a=weight(0)), update_after_step=3), 1, 2, 3, 4)
    start = float_of(peer)
    return start == 4 and 4 < float_of(updated(peer, 5)) < 5


def warmup(make):
    """With a warmup, a large decay does not hold the first weights for long."""
    peer = updated(make(named(a=weight(0)), 0.999, warmup=True), 0, 1, 1, 1)
    return float_of(peer) > 0.5


def own_schedule(make):
    """A function of the number of the update gives the decay."""
    peer = updated(make(named(a=weight(0)), rule=lambda n: 1 / (n + 1)), 0, 1, 2)
    return close(float_of(peer), (0.5 + 2 * 2) / 3)


def another_object(make):
    """An update takes the weights of another model object."""
    peer = updated(make(named(a=weight(0))), 0)
    peer.update(named(a=weight(1)))
    return 0 < float_of(peer) < 1 and peer.model.a.item() == 0


def names(make):
    """An update from a model that defines the same parameters in another order matches names."""
    peer = updated(make(named(a=weight(0), b=weight(0))), 0)
    peer.update(named(b=weight(0), a=weight(1)))
    return 0 < float_of(peer, "a") < 1 and float_of(peer, "b") == 0


def mismatch(make):
    """An update from parameters of another shape raises, and changes no average."""
    peer = updated(make(named(a=weight(0), b=weight(0))), 0)
    fill(peer.model, 1)
    peer.model.b = weight(1, size=3)
    try:
        peer.update()
    except REFUSALS:
        return peer.values()["a"].item() == 0
    return False


def later_parameters(make):
    """The average takes in a parameter that the model got later, and keeps the others."""
    peer = updated(make(named(a=weight(0))), 0)
    peer.model.b = weight(2)
    peer.rebind()
    peer.update()
    return float_of(peer, "a") == 0 and float_of(peer, "b") == 2


def lazy_modules(make):
    """An average that is made before the first forward follows the parameters that then appear."""
    model = nn.LazyLinear(1)
    with refusable():
        peer = make(model)
        model(torch.zeros(1, 2))
        return float_of(updated(peer, 1, 1), "bias") == 1
    return False


def not_copyable(make):
    """A model that keeps a tensor of its last graph, which `deepcopy` refuses, can be averaged."""
    model = named(a=weight(1))
    model.cache = model.a * 2
    with refusable():
        return float_of(updated(make(model), 1, 1)) == 1
    return False


@contextlib.contextmanager
def one_rank():
    """Form a process group of this process alone."""
    dist = torch.distributed
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield dist.device_mesh.init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


def fully_sharded(make):
    """The parameters of a model under `fully_shard` are averaged as sharded tensors."""
    from torch.distributed.fsdp import fully_shard

    with one_rank() as mesh:
        model = nn.Linear(2, 2)
        fully_shard(model, mesh=mesh)
        with refusable():
            average = updated(make(model), 0, 0, 1).values()["weight"]
            return hasattr(average, "placements") and 0 < average.to_local().mean().item() < 1
    return False


# How the average is used.


def swaps_nest(make):
    """Inside two swaps and after them, the model has the right weights."""
    peer = updated(make(named(a=weight(1))), 1, 1, 0)
    model, average = peer.model, float_of(peer)
    with peer.swapped():
        with peer.swapped():
            inner = model.a.item()
        outer = model.a.item()
    return close(inner, average) and close(outer, average) and model.a.item() == 0


def swap_without_copies(make):
    """Swapping in and out runs no operator that copies elements."""
    peer = updated(make(named(a=weight(1))), 1, 1, 0)
    average = float_of(peer)
    with Calls() as calls, peer.swapped():
        # Reading a value is an operator too.
        before, inside = [*calls.names], peer.model.a.detach()
        value = inside.item()
    copies = {"copy_", "clone", "_to_copy", "_foreach_copy_"}
    return close(value, average) and not copies & {*before, *calls.names}


def error_in_swap(make):
    """An error inside a swap leaves the training weights in the model."""
    peer = updated(make(named(a=weight(1))), 1, 1, 0)
    with contextlib.suppress(KeyError), peer.swapped():
        raise KeyError
    return peer.model.a.item() == 0


def callable_average(make):
    """The average can be called as a model while the model trains."""
    peer = updated(make(nn.Linear(1, 1)), 1, 1, 0)
    expected = peer.values()["weight"].item() + peer.values()["bias"].item()
    return close(peer.called(torch.ones(1, 1)).item(), expected)


def replaces_weights(make):
    """One call makes the average the weights in training, and averaging goes on from there."""
    peer = updated(make(named(a=weight(1))), 1, 1, 0)
    average = float_of(peer)
    peer.replace()
    peer.update()
    return close(peer.model.a.item(), average) and close(float_of(peer), average)


def to(make):
    """A running average is cast to float64, and the next updates keep that."""
    peer = updated(make(named(a=weight(0))), 0)
    peer.to(torch.float64)
    with refusable():
        updated(peer, 1)
        return peer.values()["a"].dtype == torch.float64 and 0 < float_of(peer) < 1
    return False


# Saving and loading.


def reloaded(state):
    """Send a state through `torch.save` and `torch.load`."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def resume(make):
    """A run that was interrupted ends bitwise where the one that was not ends."""

    def run(interrupted):
        torch.manual_seed(0)
        model = nn.Linear(3, 3)
        peer = make(model, 0.9)
        for step in range(12):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(torch.randn_like(parameter))
            peer.update()
            if interrupted and step == 5:
                state = reloaded(peer.state_dict())
                peer = make(model, 0.9)
                peer.load_state_dict(state)
        return peer.values()

    first, second = run(interrupted=False), run(interrupted=True)
    return all(torch.equal(first[name], second[name]) for name in first)


def state_by_name(make):
    """A state loads by name into a model that defines the parameters in another order, or is refused."""
    saved = make(named(a=weight(1), b=weight(2)))
    saved.update()
    loaded = make(named(b=weight(0), a=weight(0)))
    try:
        loaded.load_state_dict(saved.state_dict())
    except REFUSALS:
        return True
    return float_of(loaded) == 1


def state_holds_the_decay(make):
    """An average that resumes from a state has the saved decay, not the one of its constructor."""

    def run(decay_of_rest):
        peer = updated(make(named(a=weight(1)), 0.05), 1, 1, 0)
        resumed = make(peer.model, decay_of_rest)
        resumed.load_state_dict(peer.state_dict())
        return float_of(updated(resumed, 1))

    return close(run(0.05), run(0.01), 1e-9)


def state_with_weights_only(make):
    """The state goes through `torch.save` and through `torch.load` with `weights_only=True`."""
    state = updated(make(named(a=weight(1))), 1, 1).state_dict()
    return reloaded(state).keys() == state.keys()


def plain_weights(make):
    """An average starts from a plain state dict of averaged weights."""
    peer = make(named(a=weight(0)), 0.5)
    peer.start_from({"a": torch.ones(1)})
    peer.update()
    return 0 < float_of(peer) < 1


def post_hoc(make):
    """The average of a width that is chosen after training is within one percent of that average."""
    model = named(a=weight(0))
    values = torch.linspace(0, 6, 1000).sin()
    width = 0.08
    with tempfile.TemporaryDirectory() as folder:
        update, reconstruct = make.post_hoc(model, folder)
        for value in values.tolist():
            fill(model, value)
            update()
        found = reconstruct(width)["a"].item()
    # The profile of width sigma_rel weighs the model of step t by t ** gamma.
    roots = torch.tensor(width**-2)
    gammas = torch.arange(0, 40, 1e-3, dtype=torch.float64)
    widths = ((gammas + 1) / (gammas + 3)).sqrt() / (gammas + 2)
    gamma = gammas[(widths - roots**-0.5).abs().argmin()]
    weights = torch.arange(1, 1001, dtype=torch.float64) ** gamma
    return close(found, ((weights / weights.sum()) @ values.double()).item(), 0.01)


FEATURES = {
    "a tied weight is averaged once": tied_weights,
    "several averages in one pass": several_averages,
    "only trainable parameters": trainable_only,
    "buffers are copied or averaged, by choice": buffer_policies,
    "buffers are copied or averaged, by name": buffer_policies_by_name,
    "integer buffers follow the model": integer_buffers,
    "an average of a bfloat16 model does not stall": bfloat16,
    "updates that are not finite are skipped, by choice": nonfinite,
    "an update does not synchronize with the device": host_reads,
    "`update_every`": update_every,
    "`update_after_step`": update_after_step,
    "warmup of the decay": warmup,
    "a function as schedule": own_schedule,
    "updates from another model object": another_object,
    "updates match parameters by name": names,
    "an update that does not fit is refused atomically": mismatch,
    "parameters that appear later": later_parameters,
    "lazy modules": lazy_modules,
    "models that `deepcopy` refuses": not_copyable,
    "models under `fully_shard` (FSDP2)": fully_sharded,
    "swaps in a `with` block nest": swaps_nest,
    "a swap copies nothing": swap_without_copies,
    "an error inside a swap restores the training weights": error_in_swap,
    "the average is a callable model": callable_average,
    "the average replaces the training weights, in one call": replaces_weights,
    "`to()` casts a running average": to,
    "a resumed run is bitwise identical": resume,
    "a saved average finds its parameters by name": state_by_name,
    "the state holds the decay": state_holds_the_decay,
    "the state loads with `weights_only=True`": state_with_weights_only,
    "an average starts from plain weights": plain_weights,
    "post-hoc EMA: the width is chosen after training": post_hoc,
}


def outcome(feature, library):
    """Run one cell of the table."""
    return answer(FEATURES[feature], PEERS[library])
