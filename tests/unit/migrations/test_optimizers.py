"""The state of an optimizer migrates with the model, and training goes on."""

import copy

import pytest
import torch
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import modkit
from modkit import migrations as mig
from modkit.errors import MigrationError
from tests.unit.migrations.test_migrate import declared


class Old(torch.nn.Module):
    """A model with separate projections."""

    def __init__(self):
        super().__init__()
        for name in ("q", "k", "v", "out"):
            setattr(self, name, torch.nn.Linear(4, 4))

    def forward(self, x):
        return self.out(self.q(x) * self.k(x).sigmoid() + self.v(x))


@mig.declare({2: [mig.rename("q.*", "query.*"), mig.rename("out.*", "proj.*")]})
class New(torch.nn.Module):
    """That model with other names, in another order."""

    def __init__(self):
        super().__init__()
        for name in ("proj", "query", "k", "v"):
            setattr(self, name, torch.nn.Linear(4, 4))

    def forward(self, x):
        return self.proj(self.query(x) * self.k(x).sigmoid() + self.v(x))


def train(model, optimizer, ema, steps, seed):
    """Train for some steps."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        x = torch.randn(8, 4, generator=generator)
        optimizer.zero_grad()
        (model(x) - x.flip(-1)).square().mean().backward()
        optimizer.step()
        ema.update()


def started(model, **options):
    """Return an optimizer whose parameters have names, and averages of a model."""
    named = list(model.named_parameters())
    return torch.optim.AdamW(named, lr=1e-2, **options), modkit.EMA(model, decay=0.9)


@pytest.mark.parametrize("form", ["numbers", "names"])
def test_training_goes_on(form):
    """Five steps after migrating model, averages and AdamW, all are as if nothing had been renamed."""
    old = Old()
    optimizer, ema = started(old)
    train(old, optimizer, ema, 3, seed=0)

    new = New()
    state = copy.deepcopy(old.state_dict())
    new.load_state_dict(state)
    new_optimizer, new_ema = started(new)
    versions = state._metadata
    if form == "numbers":
        saved = copy.deepcopy(optimizer.state_dict())
        new_optimizer.load_state_dict(mig.migrate(new, saved, versions=versions))
    else:
        saved = copy.deepcopy(get_optimizer_state_dict(old, optimizer))
        saved = mig.migrate(new, saved, versions=versions)
        set_optimizer_state_dict(new, new_optimizer, saved)
    averages = copy.deepcopy(ema.state_dict())
    tensors = averages["averages"][0]["tensors"]
    averages["averages"][0]["tensors"] = dict(mig.migrate(new, tensors, versions=versions))
    new_ema.load_state_dict(averages)

    train(old, optimizer, ema, 5, seed=1)
    train(new, new_optimizer, new_ema, 5, seed=1)

    expected = mig.migrate(new, old.state_dict())
    for name, value in new.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-6)
    expected = mig.migrate(new, ema.state_dict()["averages"][0]["tensors"], versions=versions)
    for name, value in new_ema.state_dict()["averages"][0]["tensors"].items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-6)


def test_back_and_without_versions():
    """Names decide where no versions are given, and the way back gives the old state."""
    old = Old()
    optimizer, ema = started(old)
    train(old, optimizer, ema, 2, seed=0)
    state = get_optimizer_state_dict(old, optimizer)

    new = mig.migrate(New(), state)
    back = mig.migrate(New(), new, to={New: 1})

    assert list(new["state"]) == [name for name, _ in New().named_parameters()]
    assert {*new["param_groups"][0]["params"]} == {*new["state"]}
    assert back["state"].keys() == state["state"].keys()
    for name, slots in state["state"].items():
        assert all(torch.equal(value, back["state"][name][slot]) for slot, value in slots.items())

    # Torch loads by position, and the order of the old model is not known.
    numbered = mig.migrate(New(), optimizer.state_dict())
    with pytest.raises(MigrationError, match=r"out\.weight is not a parameter of the model"):
        mig.migrate(New(), numbered, to={New: 1})


def test_an_added_parameter_enters_the_group():
    """A new parameter has no state, and enters the only group."""
    model = declared(
        {2: [mig.add("b", torch.ones(1)), mig.rename("w", "a")]}, a=torch.zeros(1), b=torch.zeros(1)
    )
    group = {"params": [0], "param_names": ["w"], "lr": 0.1}
    state = {"state": {0: {"step": 3, "exp_avg": torch.ones(1)}}, "param_groups": [group]}

    new = mig.migrate(model, state, versions={type(model): 1})

    assert new["param_groups"] == [{"params": [0, 1], "param_names": ["a", "b"], "lr": 0.1}]
    assert new["state"] == {0: {"step": 3, "exp_avg": torch.ones(1)}}
    assert group["param_names"] == ["w"]


def test_refusals():
    """Steps that compute, a new parameter for one of several groups, and parameters without names."""
    one = torch.ones(1)

    def state(*groups, **slots):
        return {"state": slots, "param_groups": [{"params": list(group)} for group in groups]}

    for step, given, text in (
        (
            mig.merge(["a", "b"], "c"),
            state("ab", a={"m": one}, b={"m": one}),
            "optimizer for a can",
        ),
        (mig.merge(["a", "b"], "c"), state("ab"), "optimizer for a cannot be computed"),
        (
            mig.split("a", ["b", "c"]),
            state("a", a={"m": one}),
            "optimizer for a cannot be computed",
        ),
        (mig.convert("c", torch.t), state("c", c={"m": one}), "optimizer for c cannot be computed"),
        (mig.rename("a", "c"), state([0]), "have no names"),
    ):
        model = declared({2: [step]}, c=torch.zeros(2, 2))
        for versions in ({type(model): 1}, None):
            with pytest.raises(MigrationError, match=text):
                mig.migrate(model, given, versions=versions)

    model = declared({2: [mig.add("c", one)]}, a=one, b=one, c=one)
    with pytest.raises(MigrationError, match="c may belong to any of 2 parameter groups"):
        mig.migrate(model, state("a", "b"), versions={type(model): 1})


def test_parameters_without_state():
    """An optimizer without state, or with a part of it, keeps its groups."""
    old = Old()
    optimizer = torch.optim.SGD(old.named_parameters(), lr=0.1)

    new = mig.migrate(New(), optimizer.state_dict())

    assert new["state"] == {}
    assert new["param_groups"][0]["param_names"] == [name for name, _ in New().named_parameters()]
    torch.optim.SGD(New().named_parameters(), lr=0.1).load_state_dict(new)
