"""``migrate`` and ``plan``: names, values, order and versions, upwards and downwards."""

import sys
from collections import OrderedDict

import pytest
import torch

from modkit import migrations as mig
from modkit.errors import MigrationError
from tests.cases import for_each
from tests.unit.migrations.networks import (
    equal,
    joined,
    middle_attention,
    network,
    new_attention,
    old_attention,
    versions,
)


nn = torch.nn
Attention = new_attention(nn)


def declared(table, **tensors):
    """Build a module with these parameters, whose class declares a table."""

    @mig.declare(table)
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            for name, value in tensors.items():
                setattr(self, name, nn.Parameter(value))

    return Layer()


def saved(version, **entries):
    """Return a state dict of one module in a version."""
    state_dict = OrderedDict(entries)
    state_dict._metadata = OrderedDict({"": {"version": version}})
    return state_dict


def test_an_old_state_dict_becomes_a_new_one():
    """Names, values, order and versions are those that the model saves now; the argument stays."""
    old, model = network(nn, old_attention(nn)).state_dict(), network(nn, Attention)
    names, metadata = list(old), versions(old)

    new = mig.migrate(model, old)

    assert equal(new, joined(old))
    assert list(new) == list(model.state_dict())
    assert versions(new) == versions(model.state_dict())
    assert (list(old), versions(old)) == (names, metadata)


def test_a_version_in_between_starts_there():
    """Only the steps after the saved version run."""
    middle = network(nn, middle_attention(nn)).state_dict()

    new = mig.migrate(network(nn, Attention), middle)

    assert torch.equal(new["blocks.1.qkv.weight"], middle["blocks.1.qkv.weight"])
    assert "blocks.1.masked_bias" not in new
    assert torch.equal(new["blocks.0.scale"], torch.ones(2))


def test_the_way_back():
    """``to`` returns what the old class would have written: names, values and versions."""
    source = network(nn, old_attention(nn))
    old, model = source.state_dict(), network(nn, Attention)

    back = mig.migrate(model, mig.migrate(model, old), to={Attention: 1})

    assert equal(back, old)
    assert versions(back)["blocks.0"] == versions(back)["blocks.1"] == 1
    assert versions(back)["blocks.0.out"] == 1
    assert source.load_state_dict(back) == source.load_state_dict(old)


def test_a_present_state_dict_stays_as_it_is():
    """A state dict of the present version is returned with the same tensors."""
    model = network(nn, Attention)
    state_dict = model.state_dict()

    new = mig.migrate(model, state_dict)

    assert list(new) == list(state_dict)
    assert all(new[name] is value for name, value in state_dict.items())
    assert mig.plan(model, state_dict) == []


def test_plan_reads_no_tensor():
    """A plan lists steps with names and shapes, also of tensors without values."""
    with torch.device("meta"):
        old = network(nn, old_attention(nn)).state_dict()

    lines = mig.plan(network(nn, Attention), old)

    assert lines[0] == (
        "blocks.0: Attention 1 -> 2: merge q.weight [4, 4], k.weight [4, 4], v.weight [4, 4] -> "
        "qkv.weight [12, 4]"
    )
    assert lines[2] == "blocks.0: Attention 1 -> 2: rename out.weight [4, 4] -> proj.weight [4, 4]"
    assert lines[4:6] == [
        "blocks.0: Attention 2 -> 3: drop masked_bias []",
        "blocks.0: Attention 2 -> 3: add scale [2]",
    ]
    assert len(lines) == 12


@for_each(
    "convert",
    [
        torch.t,
        lambda w: w.t(),
        lambda module, w: w.t(),
        lambda *w: w[0].t(),
        lambda module, *w: w[0].t(),
    ],
)
def test_functions_of_convert(convert):
    """A function may take the module first, by name; its results have memory of their own."""
    value = torch.arange(6.0).reshape(2, 3)
    model = declared({2: [mig.convert("w", convert, convert)]}, w=torch.zeros(3, 2))

    new = mig.migrate(model, saved(1, w=value))

    assert torch.equal(new["w"], value.t())
    assert new["w"].is_contiguous()
    assert new["w"].untyped_storage().data_ptr() != value.untyped_storage().data_ptr()
    assert torch.equal(mig.migrate(model, new, to={type(model): 1})["w"], value)


@pytest.mark.skipif(sys.version_info < (3, 14), reason="a definition evaluates its annotations")
def test_a_function_of_convert_may_have_annotations_for_type_checkers():
    """Python 3.14 evaluates annotations when they are read, and these cannot be."""

    def turn(module: Linear, w: Weight):  # type: ignore[name-defined]  # noqa: F821
        return w.t()

    model = declared({2: [mig.convert("w", turn)]}, w=torch.zeros(3, 2))

    assert mig.migrate(model, saved(1, w=torch.ones(2, 3)))["w"].shape == (3, 2)


def test_several_tensors_become_several():
    """``convert`` computes n tensors from m, for each value of the wildcards."""
    table = {2: [mig.convert(["a.*", "b.*"], lambda a, b: (a + b, a - b), new=["sum.*", "gap.*"])]}
    model = declared(table, x=torch.zeros(1))
    old = {"a.0": torch.ones(1), "b.0": torch.ones(1), "a.1": torch.ones(1), "b.1": -torch.ones(1)}

    new = mig.migrate(model, saved(1, **old))

    assert {name: float(value) for name, value in new.items()} == {
        "sum.0": 2.0,
        "gap.0": 0.0,
        "sum.1": 0.0,
        "gap.1": 2.0,
    }


def test_stacks_follow_the_numbers():
    """Stacked tensors are in the order of their numbers, and the way back has the same names."""
    table = {2: [mig.merge("experts.*.w", "w", dim=None)]}
    model = declared(table, w=torch.zeros(11, 2))
    old = saved(1, **{f"experts.{n}.w": torch.full((2,), float(n)) for n in (10, *range(10))})

    new = mig.migrate(model, old)

    assert torch.equal(new["w"], torch.arange(11.0).repeat_interleave(2).reshape(11, 2))
    assert equal(mig.migrate(model, new, to={type(model): 1}), old)


def test_splits_of_given_sizes():
    """Sizes are integers, or a function of the module; the way back joins the parts."""
    for sizes in ([4, 1, 1], lambda module: module.sizes):
        model = declared({2: [mig.split("qkv", ["q", "k", "v"], sizes=sizes)]}, x=torch.zeros(1))
        model.sizes = [4, 1, 1]
        old = saved(1, qkv=torch.arange(12.0).reshape(6, 2))

        new = mig.migrate(model, old)

        assert [new[name].shape[0] for name in "qkv"] == [4, 1, 1]
        assert all(new[name].untyped_storage().nbytes() == new[name].nbytes for name in "qkv")
        assert equal(mig.migrate(model, new, to={type(model): 1}), old)


def test_numbers_of_layers_move():
    """A layer inserted into a sequence moves those behind it, without a collision."""
    table = {
        2: [mig.rename("layers.2.**", "layers.3.**"), mig.rename("layers.1.**", "layers.2.**")]
    }
    model = declared(table, x=torch.zeros(1))

    new = mig.migrate(model, saved(1, **{f"layers.{n}.w": torch.tensor(n) for n in range(3)}))

    assert {name: int(value) for name, value in new.items()} == {
        "layers.0.w": 0,
        "layers.2.w": 1,
        "layers.3.w": 2,
    }


def test_a_moved_module_keeps_its_version():
    """A parent renames a child that declares migrations itself: the child finds its saved version."""

    @mig.declare({2: [mig.convert("w", torch.t, torch.t)]})
    class Square(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.rand(2, 2))

    @mig.declare({2: [mig.rename("inner.**", "core.net.**")]})
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.core = nn.Module()
            self.core.net = Square()

    value = torch.rand(2, 2)
    for version, expected in ((1, value.t()), (2, value)):
        old = OrderedDict({"inner.w": value})
        old._metadata = {"": {"version": 1}, "inner": {"version": version}}

        new = mig.migrate(Outer(), old)

        assert torch.equal(new["core.net.w"], expected)
        assert versions(new)["core.net"] == 2
        back = mig.migrate(Outer(), new, to={Outer: 1, Square: 1})
        assert torch.equal(back["inner.w"], value.t() if version == 2 else value)
        assert (back._metadata["inner"]["version"], back._metadata[""]["version"]) == (1, 1)


def test_tables_are_inherited_and_joined():
    """A derived class runs the steps of its base first, then its own of the same version."""

    @mig.declare({2: [mig.rename("a", "b")]})
    class Base(nn.Module):
        def __init__(self):
            super().__init__()
            self.c = nn.Parameter(torch.zeros(1))

    @mig.declare({2: [mig.rename("b", "c")]})
    class Derived(Base):
        pass

    class Silent(Derived):
        pass

    assert (Base._version, Derived._version, Silent._version) == (2, 2, 2)
    for cls in (Derived, Silent):
        assert list(mig.migrate(cls(), saved(1, a=torch.ones(1)))) == ["c"]
        model = cls()
        model.load_state_dict(saved(1, a=torch.ones(1)))
        assert float(model.c.detach()) == 1.0


def test_a_part_that_was_left_out_is_not_filled():
    """A state dict of some modules, without versions, gets no defaults for the others."""
    model = network(nn, Attention)
    part = {"head.weight": torch.zeros(2, 4), "blocks.0.qkv.weight": torch.zeros(12, 4)}

    assert equal(mig.migrate(model, part), part)


def test_wrappers_are_removed():
    """Names of DDP, compile and activation checkpointing become those of the model."""
    old, model = network(nn, old_attention(nn)).state_dict(), network(nn, Attention)
    wrapped = OrderedDict(
        (f"module._orig_mod.{name.replace('blocks.0.', 'blocks.0._checkpoint_wrapped_module.')}", v)
        for name, v in old.items()
    )
    wrapped._metadata = OrderedDict(
        [("", {"version": 1}), ("module", {"version": 1})]
        + [(f"module._orig_mod.{path}".rstrip("."), own) for path, own in old._metadata.items()]
    )

    for target in (model, nn.DataParallel(model), torch.compile(model, backend="eager")):
        new = mig.migrate(target, wrapped)

        assert equal(new, joined(old))
        assert versions(new) == versions(model.state_dict())


def test_a_child_called_module_is_kept():
    """A model's own child of the name ``module`` is not a wrapper's."""

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = Attention()

    old = {f"module.{name}": value for name, value in old_attention(nn)().state_dict().items()}

    for model in (Outer(), torch.compile(Outer(), backend="eager")):
        assert list(mig.migrate(model, old)) == list(Outer().state_dict())


def test_averages_take_the_versions_of_the_state_dict():
    """Averages without versions migrate with those of the model's state dict."""
    source = network(nn, old_attention(nn))
    averages = {name: value.detach() * 2 for name, value in source.named_parameters()}

    new = mig.migrate(network(nn, Attention), averages, versions=source.state_dict()._metadata)

    assert torch.equal(
        new["blocks.0.qkv.bias"], joined(source.state_dict())["blocks.0.qkv.bias"] * 2
    )


def test_versions_by_class():
    """``versions`` may name classes; they go before those of the state dict."""
    value = torch.rand(2, 2)
    model = declared({2: [mig.convert("w", torch.t, torch.t)]}, w=torch.zeros(2, 2))

    assert torch.equal(mig.migrate(model, {"w": value}, versions={type(model): 1})["w"], value.t())
    assert torch.equal(mig.migrate(model, {"w": value}, versions={type(model): 2})["w"], value)
    assert torch.equal(mig.migrate(model, saved(1, w=value), versions={nn.Module: 2})["w"], value)


def test_a_lazy_module_has_any_shape():
    """A parameter without a shape yet fits any."""

    @mig.declare({2: [mig.rename("fc.*", "head.*")]})
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.LazyLinear(2)

    new = mig.migrate(Net(), {"fc.weight": torch.ones(2, 3), "fc.bias": torch.ones(2)})

    assert list(new) == ["head.weight", "head.bias"]


def test_arguments_are_checked():
    """Arguments of another type raise a TypeError that names them."""
    model = network(nn, Attention)
    state_dict = model.state_dict()

    for call in (
        lambda: mig.migrate(Attention, state_dict),
        lambda: mig.migrate(model, [1]),
        lambda: mig.migrate(model, {1: 2}),
        lambda: mig.migrate(model, {0: 2}),
        lambda: mig.migrate(model, state_dict, to={"Attention": 1}),
        lambda: mig.migrate(model, state_dict, versions={"blocks": 1}),
    ):
        with pytest.raises(TypeError, match="migrate: "):
            call()
    with pytest.raises(MigrationError, match="no module of this class that declares"):
        mig.migrate(model, state_dict, to={nn.Linear: 1})
    with pytest.raises(MigrationError, match="versions 1 to 3, not 4"):
        mig.migrate(model, state_dict, to={Attention: 4})


def test_patterns_match_whole_names():
    """``*`` is one part of a name, ``**`` one or more, and nothing follows a pattern."""
    old = saved(1, **{name: torch.ones(1) for name in ("a", "a.b", "a.b.c", "a.bc.d", "x.a.b")})
    for step, expected in (
        (mig.rename("a.*", "n.*"), ["a", "n.b", "a.b.c", "a.bc.d", "x.a.b"]),
        (mig.rename("a.**", "n.**"), ["a", "n.b", "n.b.c", "n.bc.d", "x.a.b"]),
        (mig.rename("a.b.*", "n.*"), ["a", "a.b", "n.c", "a.bc.d", "x.a.b"]),
        (mig.rename("*.a.*", "*.n.*"), ["a", "a.b", "a.b.c", "a.bc.d", "x.n.b"]),
    ):
        model = declared({2: [step]}, x=torch.ones(1))

        assert set(mig.migrate(model, old)) == {*expected}


def test_an_optional_argument_is_not_the_module():
    """A function whose further arguments have defaults gets the tensors alone."""
    model = declared({2: [mig.convert("w", lambda w, factor=2: w * factor)]}, w=torch.zeros(2))

    new = mig.migrate(model, saved(1, w=torch.ones(2)))

    assert torch.equal(new["w"], torch.full((2,), 2.0))


def test_names_are_exchanged_at_once():
    """All applications of a renaming happen at once, so that two may exchange their names."""
    table = {2: [mig.convert(["a", "b"], lambda a, b, *_: (b, a), lambda a, b: (b, a))]}
    model = declared(table, a=torch.zeros(1), b=torch.zeros(1))

    new = mig.migrate(model, saved(1, a=torch.ones(1), b=torch.zeros(1)))

    assert (float(new["a"]), float(new["b"])) == (0.0, 1.0)


def test_a_checkpointed_block_migrates():
    """Blocks inside activation checkpointing migrate by the names without its part."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    old, model = network(nn, old_attention(nn)).state_dict(), network(nn, Attention)
    model.blocks[0] = checkpoint_wrapper(model.blocks[0])

    new = mig.migrate(model, old)

    assert equal(new, joined(old))
    model.load_state_dict(new)
    model.load_state_dict(old)
    assert equal(model.state_dict(), joined(old))


def test_values_that_are_not_tensors_move():
    """Extra state is renamed like tensors."""
    model = declared({2: [mig.rename("old.**", "new.**")]}, x=torch.zeros(1))

    state = saved(1, **{"old._extra_state": 5})
    assert mig.migrate(model, state)["new._extra_state"] == 5
    assert "rename old._extra_state -> new._extra_state" in mig.plan(model, state)[0]
