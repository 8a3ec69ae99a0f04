"""Random declarations on random nested modules: upwards and back, corrupted, and partly known."""

from collections import OrderedDict

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

import modkit
from modkit import migrations as mig
from tests.unit.migrations.networks import equal, versions


pytestmark = pytest.mark.property

WIDTHS = st.integers(1, 3)


def rolled(tensor):
    """Move the first dimension to the end."""
    return tensor.movedim(0, -1) if tensor.dim() else tensor


def unrolled(tensor):
    """Move the last dimension to the front."""
    return tensor.movedim(-1, 0) if tensor.dim() else tensor


@st.composite
def tables(draw):
    """Draw the shapes of a module in version 1, a table of steps, and the shapes at the end."""
    shapes = {
        f"{owner}{number}.{leaf}": tuple(draw(st.lists(WIDTHS, min_size=1, max_size=3)))
        for number, owner in enumerate(
            draw(st.lists(st.sampled_from("abc"), min_size=1, max_size=4))
        )
        for leaf in draw(st.sets(st.sampled_from(["w", "x"]), min_size=1))
    }
    first, table, fresh = dict(shapes), {}, iter(range(1000))
    for version in range(2, 2 + draw(st.integers(1, 3))):
        table[version] = []
        for _ in range(draw(st.integers(1, 3))):
            step, shapes = draw(steps(shapes, fresh))
            table[version].append(step)
    return first, table, shapes


@st.composite
def steps(draw, shapes, fresh):
    """Draw a step that is possible for these shapes; return it with the shapes after it."""
    name = draw(st.sampled_from(sorted(shapes)))
    owner, _, leaf = name.rpartition(".")
    shape = shapes[name]
    rest = {other: value for other, value in shapes.items() if other != name}
    new = f"n{next(fresh)}"
    kind = draw(st.sampled_from(["owner", "leaf", "split", "stack", "turn", "add", "merge"]))

    if kind == "owner" and owner:
        moved = {
            f"{new}{other.removeprefix(owner)}" if other.startswith(f"{owner}.") else other: value
            for other, value in shapes.items()
        }
        return mig.rename(f"{owner}.**", f"{new}.**"), moved
    if kind == "split" and shape and shape[0] % 2 == 0:
        half = (shape[0] // 2, *shape[1:])
        names = [f"{new}.l", f"{new}.r"]
        return mig.split(name, names), {**rest, **dict.fromkeys(names, half)}
    if kind == "stack" and shape:
        parts = {f"{new}.{number}": shape[1:] for number in range(shape[0])}
        return mig.split(name, f"{new}.*", dim=None), {**rest, **parts}
    if kind == "turn":
        turned = mig.convert(name, rolled, unrolled)
        return turned, {**shapes, name: (*shape[1:], shape[0]) if shape else shape}
    if kind == "add":
        return mig.add(f"{new}.added", torch.ones(2)), {**shapes, f"{new}.added": (2,)}
    if kind == "merge":
        twins = [other for other, value in rest.items() if value == shape and shape]
        if twins:
            kept = {other: value for other, value in rest.items() if other != twins[0]}
            joined = (2 * shape[0], *shape[1:])
            return mig.merge([name, twins[0]], f"{new}.m"), {**kept, f"{new}.m": joined}
    return mig.rename(name, f"{new}.{leaf}"), {**rest, f"{new}.{leaf}": shape}


def module_of(shapes, cls):
    """Return a module of a class with parameters at these names."""
    root = cls()
    for name, shape in shapes.items():
        *path, leaf = name.split(".")
        owner = root
        for part in path:
            if part not in owner._modules:
                owner.add_module(part, nn.Module())
            owner = owner._modules[part]
        owner.register_parameter(leaf, nn.Parameter(torch.zeros(shape)))
    return root


@st.composite
def trees(draw):
    """Draw a model that nests declared modules, its state dict of version 1, and the classes."""
    root: nn.Module = modkit.nn.Module() if draw(st.booleans()) else nn.Module()
    old, metadata, classes = OrderedDict(), {"": {"version": 1}}, {}
    for number in range(draw(st.integers(1, 3))):
        first, table, last = draw(tables())
        base = draw(st.sampled_from([nn.Module, modkit.nn.Module]))
        cls = mig.declare(table)(type(f"Declared{number}", (base,), {}))
        path = f"m{number}" if draw(st.booleans()) else f"outer{number}.inner"
        owner = root
        for part in path.split(".")[:-1]:
            owner.add_module(part, nn.Module())
            owner = owner._modules[part]
        owner.add_module(path.rpartition(".")[2], module_of(last, cls))
        for name, shape in first.items():
            old[f"{path}.{name}"] = torch.randn(shape)
        metadata[path] = {"version": 1}
        classes[cls] = path
    old._metadata = OrderedDict(metadata)
    return root, old, classes


def error_of(load, state_dict):
    """Return the text of the error of a load, or None."""
    try:
        load(state_dict)
    except RuntimeError as error:
        return str(error)
    return None


@given(trees())
def test_up_and_down_is_the_identity(drawn):
    """Up, then down, is bitwise the identity; names, order and versions are the model's in between."""
    model, old, classes = drawn

    new = mig.migrate(model, old)
    back = mig.migrate(model, new, to=dict.fromkeys(classes, 1))

    assert list(new) == list(model.state_dict())
    assert {name: value.shape for name, value in new.items()} == {
        name: value.shape for name, value in model.state_dict().items()
    }
    assert versions(new) == versions(model.state_dict())
    assert equal(back, old)
    assert {path: versions(back)[path] for path in classes.values()} == dict.fromkeys(
        classes.values(), 1
    )
    assert len(mig.plan(model, old)) >= len(mig.plan(model, new)) == 0


@given(trees())
def test_both_loaders_load_what_migrate_returns(drawn):
    """The loaders of torch and of modkit take the old state dict."""
    model, old, _ = drawn
    expected = mig.migrate(model, old)

    for load in (lambda given: nn.Module.load_state_dict(model, given), model.load_state_dict):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        load(old)

        assert equal(model.state_dict(), expected)


@given(trees())
def test_without_versions_it_is_right_or_refused(drawn):
    """Without versions, the result is the same, or the state dict may be of two versions."""
    model, old, _ = drawn
    expected = mig.migrate(model, old)

    for entries in (dict(old), dict(expected)):
        error = error_of(lambda given: mig.migrate(model, given), entries)

        assert error is None or "no version" in error
        assert error is not None or equal(mig.migrate(model, entries), expected)


@given(trees(), st.data())
def test_corrupt_state_dicts_are_refused_or_harmless(drawn, data):
    """A tensor that is lost, renamed or of another shape is an error of the load, and writes nothing."""
    model, old, _ = drawn
    name = data.draw(st.sampled_from(sorted(old)))
    corrupt = OrderedDict(old)
    corrupt._metadata = old._metadata
    value = corrupt.pop(name)
    kind = data.draw(st.sampled_from(["lost", "renamed", "reshaped", "newer"]))
    if kind == "renamed":
        corrupt[f"{name}_"] = value
    if kind == "reshaped":
        corrupt[name] = torch.randn(*value.shape, 2)
    if kind == "newer":
        corrupt[name] = value
        path = data.draw(st.sampled_from(sorted(path for path in old._metadata if path)))
        corrupt._metadata = {**old._metadata, path: {"version": 9}}
    before = {key: each.clone() for key, each in model.state_dict().items()}

    error = error_of(lambda given: modkit.load_state_dict(model, given), corrupt)

    assert error is not None
    assert equal(model.state_dict(), before)
