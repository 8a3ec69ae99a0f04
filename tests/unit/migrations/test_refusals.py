"""Refusals: at the class, and in a state dict. Nothing is changed then."""

import pytest
import torch

from modkit import migrations as mig
from modkit.errors import MigrationError
from tests.cases import for_each
from tests.unit.migrations.test_migrate import declared, saved


nn = torch.nn
ONE, TWO = torch.ones(1), torch.ones(2)


@for_each(
    ("step", "text"),
    [
        (lambda: mig.rename("a.*", "b"), "same wildcards"),
        (lambda: mig.rename("a.*", "b.**"), "same wildcards"),
        (lambda: mig.rename("a*.w", "b*.w"), "whole parts"),
        (lambda: mig.rename("a..w", "b.w"), "single dots"),
        (lambda: mig.rename("**.a.**", "**.b.**"), r"several \*\*"),
        (lambda: mig.rename(1, "b"), "is a str"),
        (lambda: mig.merge(["a", "a"], "b"), "listed twice"),
        (lambda: mig.merge(["a.*", "b"], "c.*"), "same wildcards"),
        (lambda: mig.merge(["a", "b"], "c", dim=None), "dim=None needs one name"),
        (lambda: mig.merge("a.*", "c.*", dim=None), "dim=None needs one name"),
        (lambda: mig.split("a", "b", dim=0), "needs several names"),
        (lambda: mig.split("a", "b.*", dim=None, sizes=[1]), "without sizes"),
        (lambda: mig.add("a.*", ONE), "full name"),
        (lambda: mig.drop("a.*", ONE), "full name"),
        (lambda: mig.convert("a", 5), "not a function"),
    ],
)
def test_steps(step, text):
    """A step that cannot be undone, or names nothing, is a TypeError."""
    with pytest.raises(TypeError, match=text):
        step()


def test_classes():
    """A table that does not fit the class is a TypeError at the class."""
    step = mig.rename("a", "b")

    class Old(nn.Module):
        _version = 2

    for cls, table, text in (
        (int, {2: [step]}, "not a class of torch.nn.Module"),
        (type("Net", (nn.Module,), {}), {1: [step]}, "versions are 2 and more"),
        (type("Net", (nn.Module,), {}), {2: step}, "needs a list of steps"),
        (type("Net", (nn.Module,), {}), {2: ["a"]}, "needs a list of steps"),
        (type("Net", (nn.Module,), {"_version": 2}), {3: [step]}, "_version is 2"),
        (type("Net", (Old,), {}), {2: [step]}, "has version 2 already; begin with 3"),
        (type("Net", (nn.BatchNorm1d,), {}), {2: [step]}, "has version 2 already"),
    ):
        with pytest.raises(TypeError, match=text):
            mig.declare(table)(cls)
    cls = mig.declare({2: [step]})(type("Net", (nn.Module,), {}))
    with pytest.raises(TypeError, match="declares migrations already"):
        mig.declare({3: [step]})(cls)


QKV = mig.merge(["q.*", "k.*", "v.*"], "qkv.*")


@for_each(
    ("table", "entries", "text"),
    [
        ([QKV], {"q.w": ONE, "k.w": ONE}, "q.w is in the state dict, but v.w is missing"),
        ([QKV], {"q.w": ONE, "k.w": ONE, "v.w": ONE.half()}, "several dtypes"),
        ([QKV], {"q.w": ONE, "k.w": ONE, "v.w": TWO}, r"sizes along dim=0 are \[1, 1, 2\]"),
        ([QKV], {"q.w": ONE, "k.w": ONE, "v.w": ONE, "qkv.b": ONE}, "qkv.b is not from this step"),
        (
            [mig.merge("e.*", "e", dim=None)],
            {"e.0": ONE, "e.2": ONE},
            "e.2 is in the state dict, but e.1 is missing",
        ),
        (
            [mig.merge("e.*", "e", dim=None)],
            {"e.1": ONE},
            "e.1 is in the state dict, but e.0 is missing",
        ),
        (
            [mig.merge("e.*", "e", dim=None)],
            {"e.0": ONE, "e.1": ONE, "e.01": TWO},
            "e.01 is in the state dict, but e.2 is missing",
        ),
        ([mig.merge("e.*", "e", dim=None)], {f"e.{'1' * 5000}": ONE}, "but e.0 is missing"),
        ([mig.rename("a", "b")], {"a": ONE, "b": ONE}, "two tensors would get the name b"),
        ([mig.rename("a.*", "b.*")], {"a.w": ONE, "b.v": ONE}, "b.v is not from this step"),
        ([mig.add("a", ONE)], {"a": ONE}, "two tensors would get the name a"),
        ([mig.split("a", ["b", "c"])], {"a": torch.ones(3)}, "3 is not divisible into 2"),
        (
            [mig.split("a", ["b", "c"], sizes=[1, 1])],
            {"a": torch.ones(3)},
            "split a -> b, c failed",
        ),
        ([mig.convert("a", lambda a: a @ a)], {"a": torch.ones(2, 3)}, "convert a -> a failed"),
        ([mig.convert("a", lambda a: [a, a])], {"a": ONE}, "2 tensors for 1 names"),
        ([mig.convert("a", torch.t)], {"a": 5}, "a is a int"),
        ([mig.add("a", lambda module: 5)], {"x": ONE}, "default of a is not a tensor but int"),
    ],
)
def test_state_dicts(table, entries, text):
    """A step that is impossible names the class, the step and the tensors."""
    model = declared({2: table}, x=ONE)
    before = dict(entries)

    with pytest.raises(MigrationError, match=f"Layer: .*{text}") as caught:
        mig.migrate(model, saved(1, **entries))

    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, RuntimeError)
    assert entries == before


def test_newer_files():
    """A file newer than the class names the module and both versions."""
    model = nn.Sequential(declared({2: [mig.rename("a", "b")]}, b=ONE))
    state_dict = model.state_dict()
    state_dict._metadata["0"]["version"] = 7

    with pytest.raises(
        MigrationError, match=r"0: Layer was saved in version 7, and .* has version 2"
    ):
        mig.migrate(model, state_dict)


def test_steps_without_an_inverse():
    """The way back through a step without an inverse is refused, and names it."""
    for step, needed in (
        (mig.drop("a"), "declare a default"),
        (mig.convert("a", torch.t), "declare a function down="),
    ):
        model = declared({2: [step]}, b=ONE)

        with pytest.raises(MigrationError, match=f"{step} has no inverse; {needed}"):
            mig.migrate(model, saved(2, b=ONE), to={type(model): 1})


@pytest.mark.filterwarnings("ignore:.*quantize_per_tensor:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_quantized_and_sharded_tensors():
    """A step that computes refuses tensors whose elements are stored in another way."""
    model = declared({2: [mig.merge(["a", "b"], "c")]}, c=TWO)
    quantized = torch.quantize_per_tensor(ONE, 0.1, 0, torch.qint8)

    class Shard(torch.Tensor):
        pass

    turned = declared({2: [mig.convert("w", torch.t)]}, w=torch.ones(2, 2))
    with pytest.raises(MigrationError, match="w is a Shard; migrate the full state dict"):
        mig.migrate(turned, {"w": torch.ones(2, 2).as_subclass(Shard)})
    for value, kind in ((quantized, "quantized tensor"), (ONE.as_subclass(Shard), "Shard")):
        with pytest.raises(MigrationError, match=f"a is a {kind}; migrate the full state dict"):
            mig.migrate(model, saved(1, a=value, b=value))


def test_both_versions_fit():
    """A square weight without a version may be of two: refused, with the argument that decides."""
    model = nn.Sequential(declared({2: [mig.convert("w", torch.t, torch.t)]}, w=torch.ones(2, 2)))

    with pytest.raises(MigrationError) as caught:
        mig.migrate(model, {"0.w": torch.ones(2, 2)})

    assert str(caught.value) == (
        "0: Layer: the state dict has no version, and w may be of version 1 or 2; say which: "
        "migrate(model, state_dict, versions={Layer: 1})"
    )
    assert list(mig.migrate(model, {"0.w": torch.ones(2, 2)}, versions={type(model[0]): 2})) == [
        "0.w"
    ]


def test_functions_that_need_values():
    """A function that cannot be tried out on meta tensors needs the version; with it, it runs."""
    step = mig.convert("w", lambda w: torch.tensor(w.tolist()).t())
    model = declared({2: [step]}, w=torch.ones(2, 2))

    with pytest.raises(MigrationError, match="convert w -> w failed on meta tensors"):
        mig.migrate(model, {"w": torch.ones(2, 2)})

    assert mig.migrate(model, saved(1, w=torch.ones(2, 2)))["w"].tolist() == [[1.0, 1.0]] * 2


def test_versions_that_are_not_numbers():
    """The metadata of a file may hold anything: what is not a version is refused, or taken for none."""
    model = declared({2: [mig.rename("a", "b")]}, b=ONE)

    with pytest.raises(MigrationError, match="was saved in version 'x', which is not a number"):
        mig.migrate(model, saved("x", a=ONE))
    odd = saved(1, a=ONE)
    odd._metadata[""] = None

    assert list(mig.migrate(model, odd)) == ["b"]


def test_half_a_merge_without_a_version():
    """Old names are there, so the error says what their step lacks, not that names are unknown."""
    model = declared({2: [QKV]}, x=ONE)

    with pytest.raises(MigrationError, match=r"q\.w is in the state dict, but v\.w is missing"):
        mig.migrate(model, {"q.w": ONE, "k.w": ONE})


def test_two_bases():
    """A class whose version is below that of its second base is refused, until it declares its own."""
    first = mig.declare({2: [mig.rename("a", "c")]})(type("First", (nn.Module,), {}))
    second = mig.declare({3: [mig.rename("b", "d")]})(type("Second", (nn.Module,), {}))
    old = saved(1, a=ONE, b=TWO)
    plain = type("Both", (first, second), {})
    complete = mig.declare({})(type("Both", (first, second), {}))

    for given in (old, dict(old)):
        with pytest.raises(MigrationError, match=r"Both has version 2 .* put @declare\({}\) on it"):
            mig.migrate(plain(), given)
    assert list(mig.migrate(complete(), old)) == ["c", "d"]
    assert list(mig.migrate(type("Both", (second, first), {})(), old)) == ["c", "d"]
