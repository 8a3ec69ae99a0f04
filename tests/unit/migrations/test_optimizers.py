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


@mig.declare({2: [mig.merge(["q.*", "k.*", "v.*"], "qkv.*"), mig.rename("out.*", "proj.*")]})
class New(torch.nn.Module):
    """That model with one projection."""

    def __init__(self):
        super().__init__()
        self.proj = torch.nn.Linear(4, 4)
        self.qkv = torch.nn.Linear(4, 12)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.proj(q * k.sigmoid() + v)


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


def test_factored_moments_are_refused():
    """Sums over the rows and the columns of a square matrix have one size, and are not joined."""
    model = declared({2: [mig.merge(["q", "k"], "qk"), mig.rename("o", "out")]})
    model.qk, model.out = (torch.nn.Parameter(torch.zeros(size, 4)) for size in (8, 4))

    def of(*names, size=4):
        slots = {"step": 3, **{f"exp_avg_sq_{of}": torch.ones(size) for of in ("row", "col")}}
        return {"state": dict.fromkeys(names, slots), "param_groups": [{"params": [*names]}]}

    for state, version, to in (
        (of("q", "k"), 1, None),
        (of("q", "k", "o"), 1, None),
        (of("qk", size=8), 2, {type(model): 1}),
    ):
        with pytest.raises(MigrationError, match=r"for (qk|q), which is not that of the parameter"):
            mig.migrate(model, state, versions={type(model): version}, to=to)
    assert [*mig.migrate(model, of("o"), versions={type(model): 1})["state"]] == ["out"]


def test_a_stack_is_split_with_its_state():
    """Each part gets its part of the tensors, and scalars of its own."""
    table = {2: [mig.split("experts", "experts.*", dim=None)]}
    model = declared(table)
    model.experts = torch.nn.ParameterList(torch.zeros(2) for _ in range(3))
    moments = torch.arange(6.0).reshape(3, 2)
    slots = {"step": torch.tensor(4.0), "exp_avg": moments}
    group = {"params": ["experts"], "lr": 0.1}
    state = {"state": {"experts": slots}, "param_groups": [group]}

    new = mig.migrate(model, state, versions={type(model): 1})
    back = mig.migrate(model, new, versions={type(model): 2}, to={type(model): 1})

    names = [f"experts.{number}" for number in range(3)]
    assert new["param_groups"] == [{"params": names, "lr": 0.1}]
    assert [new["state"][name]["exp_avg"].tolist() for name in names] == moments.tolist()
    assert [float(new["state"][name]["step"]) for name in names] == [4.0] * 3
    assert len({new["state"][name]["step"].data_ptr() for name in names}) == 3
    assert list(back["state"]["experts"]) == ["step", "exp_avg"]
    assert torch.equal(back["state"]["experts"]["exp_avg"], moments)
    with pytest.raises(MigrationError, match="so the number of parts is unknown"):
        mig.migrate(model, {**state, "state": {}}, versions={type(model): 1})


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
    """Scalars that differ, other shapes, converted tensors, and parameters of several groups."""
    table = {2: [mig.merge(["a", "b"], "c")]}
    model = declared(table, c=torch.zeros(2))
    turned = declared({2: [mig.convert("c", torch.t)]}, c=torch.zeros(2, 2))
    one, versions = torch.ones(1), {type(model): 1, type(turned): 1}

    def state(groups=(("a", "b"),), **slots):
        return {"state": slots, "param_groups": [{"params": list(group)} for group in groups]}

    for owner, given, text in (
        (model, state(a={"step": 1}, b={"step": 2}), "'step' of the optimizer differs among a, b"),
        (model, state(a={"m": one}, b={}), "'m' of the optimizer differs among a, b"),
        (model, state(a={"m": one, "row": torch.ones(2)}, b={"m": one}), "'row' of the optimizer"),
        (model, state([["a"], ["b"]], a={}, b={}), "c may belong to any of 2 parameter groups"),
        (turned, state([["c"]], c={"m": one}), "state of an optimizer for c cannot be computed"),
        (model, {"state": {}, "param_groups": [{"params": [0]}]}, "have no names"),
    ):
        with pytest.raises(MigrationError, match=text):
            mig.migrate(owner, given, versions=versions)
    with pytest.raises(MigrationError, match="state of an optimizer for c cannot be computed"):
        mig.migrate(turned, state([["c"]], c={"m": torch.ones(2, 2)}))


def test_parameters_without_state():
    """An optimizer without state, or with a part of it, keeps its groups."""
    old = Old()
    optimizer = torch.optim.SGD(old.named_parameters(), lr=0.1)

    new = mig.migrate(New(), optimizer.state_dict())

    assert new["state"] == {}
    assert new["param_groups"][0]["param_names"] == [name for name, _ in New().named_parameters()]
    torch.optim.SGD(New().named_parameters(), lr=0.1).load_state_dict(new)
