"""Loading old state dicts into classes that declare migrations, with torch's loader and modkit's."""

import copy
import pickle
import sys
from collections import OrderedDict

import pytest
import torch

import modkit
from modkit import migrations as mig
from modkit.migrations import declarations
from tests.cases import for_each
from tests.unit.migrations.networks import (
    equal,
    joined,
    network,
    new_attention,
    old_attention,
)


def test_old_state_dicts_load(impl):
    """A state dict of any version, with or without versions, loads; the argument is not modified."""
    old = network(impl.nn, old_attention(impl.nn)).state_dict()
    names, metadata = list(old), copy.deepcopy(old._metadata)
    model = network(impl.nn, new_attention(impl.nn))

    for given in (old, dict(old)):
        other = copy.deepcopy(model)
        result = other.load_state_dict(given)

        assert (result.missing_keys, result.unexpected_keys) == ([], [])
        assert equal(other.state_dict(), joined(old))
    assert (list(old), old._metadata) == (names, metadata)


def test_a_renamed_child_that_renames_its_tensors(impl):
    """Where no name of a child has stayed, its path alone shows the version of its parent."""

    @mig.declare({2: [mig.rename("wq.*", "q_proj.*")]})
    class Attention(impl.nn.Module):
        def __init__(self):
            super().__init__()
            self.q_proj = torch.nn.Linear(2, 2, bias=False)

    @mig.declare({2: [mig.rename("attention.**", "self_attn.**")]})
    class Block(impl.nn.Module):
        def __init__(self):
            super().__init__()
            self.self_attn = Attention()

    weight = torch.rand(2, 2)
    model = impl.nn.Sequential(Block(), Block())
    for path in ("attention.wq", "self_attn.wq", "self_attn.q_proj"):
        model.load_state_dict({f"{number}.{path}.weight": weight * number for number in range(2)})

        assert torch.equal(model[0].self_attn.q_proj.weight, weight * 0)
        assert torch.equal(model[1].self_attn.q_proj.weight, weight)


def test_a_class_and_its_child_that_both_add_a_tensor(impl):
    """Without versions, a tensor is added where all others fit; children of an old version do not."""

    @mig.declare({2: [mig.rename("gamma", "weight"), mig.add("bias", torch.ones(2))]})
    class Norm(impl.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(2))
            self.bias = torch.nn.Parameter(torch.zeros(2))

    @mig.declare({2: [mig.add("scale", torch.ones(1))]})
    class Block(impl.nn.Module):
        def __init__(self):
            super().__init__()
            self.norms = torch.nn.ModuleList([Norm(), Norm()])
            self.scale = torch.nn.Parameter(torch.zeros(1))

    model = Block()
    old = {f"norms.{number}.gamma": torch.ones(2) for number in range(2)}
    # A part of a state dict is not filled, whatever its names are.
    missing = model.load_state_dict({"norms.0.gamma": torch.ones(2)}, strict=False).missing_keys
    assert {"scale", "norms.1.weight", "norms.1.bias"} == {*missing}
    assert model.scale.item() == 0.0

    with pytest.raises(RuntimeError, match=r'Missing.*"scale"'):
        model.load_state_dict(old)

    model.load_state_dict(mig.migrate(model, old, versions={Block: 1}))

    assert all(bool(value.eq(1).all()) for value in model.state_dict().values())


def test_a_tensor_that_was_added_and_dropped(impl):
    """Tensors that only versions in between had leave no doubt about the version of another file."""

    @mig.declare(
        {
            2: [mig.add("mask", torch.ones(1)), mig.rename("old", "new")],
            3: [mig.rename("mask", "bias_mask")],
            4: [mig.drop("bias_mask")],
        }
    )
    class Net(impl.nn.Module):
        def __init__(self):
            super().__init__()
            self.new = torch.nn.Parameter(torch.zeros(1))
            self.other = torch.nn.Parameter(torch.zeros(1))

    one = torch.ones(1)
    for given in (
        {"new": one},
        {"old": one},
        {"new": one, "mask": one},
        {"new": one, "bias_mask": one},
    ):
        model = Net()
        model.load_state_dict({**given, "other": one})

        assert model.new.item() == 1.0


def test_options_of_loading(impl):
    """``assign`` takes the migrated tensors, and ``strict=False`` lists what is still absent."""
    old = network(impl.nn, old_attention(impl.nn)).state_dict()
    with torch.device("meta"):
        model = network(impl.nn, new_attention(impl.nn))

    model.load_state_dict(old, assign=True)

    assert equal(model.state_dict(), joined(old))
    del old["head.bias"]
    assert model.load_state_dict(old, strict=False).missing_keys == ["head.bias"]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="needs notes on exceptions: Python 3.11")
def test_the_note_is_about_the_migrated_names():
    """Entries that do not fit after a migration are explained with the names that the error has."""
    old = network(modkit.nn, old_attention(modkit.nn)).state_dict()
    old["head.weight"], old["head.bias"] = torch.ones(3, 4), torch.ones(3)
    for name in ("q", "k", "v", "out"):
        old[f"blocks.2.{name}.weight"], old[f"blocks.2.{name}.bias"] = (
            torch.ones(4, 4),
            torch.ones(4),
        )
    model = network(modkit.nn, new_attention(modkit.nn))

    for given in (old, dict(old)):
        with pytest.raises(RuntimeError, match=r"blocks\.2") as caught:
            model.load_state_dict(given)

        depth, classes = caught.value.__notes__
        assert depth == "another depth: 'blocks' has 3 entries in the checkpoint, 2 in the model"
        assert classes.startswith(
            "another number of outputs, classes or words: 'head.weight' is [3, 4]"
        )


def test_a_newer_state_dict_is_refused(impl):
    """A file newer than the class does not load in silence."""
    model = network(impl.nn, new_attention(impl.nn))
    newer = model.state_dict()
    newer._metadata["blocks.0"]["version"] = 4

    with pytest.raises(RuntimeError, match=r"blocks.0: Attention was saved in version 4"):
        model.load_state_dict(newer)


def test_what_a_file_lacks_is_named():
    """The error has the module, the step and the tensor; the other modules load, as in torch."""
    old = network(torch.nn, old_attention(torch.nn)).state_dict()
    del old["blocks.1.k.weight"]
    model = network(modkit.nn, new_attention(modkit.nn))

    with pytest.raises(RuntimeError) as caught:
        modkit.load_state_dict(model, old)

    assert (
        "blocks.1: Attention: merge q.*, k.*, v.* -> qkv.*: q.weight is in the state dict, but k.weight is missing"
        in str(caught.value)
    )


def test_a_refused_load_of_the_present_version_changes_nothing():
    """Where there is nothing to migrate, all entries are checked before the first one is written."""
    model = network(modkit.nn, new_attention(modkit.nn))
    before = copy.deepcopy(model.state_dict())
    present = copy.deepcopy(before)
    present["head.bias"] = torch.ones(9)
    for name in before:
        if name != "head.bias":
            present[name] = present[name] + 1

    with pytest.raises(RuntimeError, match=r"head\.bias"):
        model.load_state_dict(present)

    assert equal(model.state_dict(), before)


def square(nn, **members):
    """Return a class whose one step transposes a square weight, which keeps its shape."""

    class Square(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.zeros(2, 2))

    for name, value in members.items():
        setattr(Square, name, value)
    return mig.declare({2: [mig.convert("w", torch.t, torch.t)]})(Square)


def test_the_method_of_the_class_is_called_afterwards(impl):
    """The class's own loader gets migrated entries, and the version that was saved."""
    calls = []

    def own(self, state_dict, prefix, local_metadata, *rest):
        calls.append((list(state_dict), local_metadata.get("version")))
        super(type(self), self)._load_from_state_dict(state_dict, prefix, local_metadata, *rest)

    class Net(impl.nn.Module):
        _load_from_state_dict = own

        def __init__(self):
            super().__init__()
            self.new = torch.nn.Parameter(torch.zeros(1))

    model = mig.declare({2: [mig.rename("old", "new")]})(Net)()
    old = OrderedDict(old=torch.ones(1))
    old._metadata = {"": {"version": 1}}

    model.load_state_dict(old)

    assert calls == [(["new"], 1)]
    assert float(model.new.detach()) == 1.0


@for_each("load", ["method", "function"])
@for_each("saved", ["old", "new"])
def test_the_method_of_a_base_is_called_afterwards(impl, saved, load):
    """The loader of a class that the declared one is derived from takes part in every load."""

    class Scaled(impl.nn.Module):
        def __init__(self):
            super().__init__()
            self.new = torch.nn.Parameter(torch.zeros(1))

        def _load_from_state_dict(self, state_dict, prefix, *rest):
            state_dict[f"{prefix}new"] = state_dict[f"{prefix}new"] * 10
            super()._load_from_state_dict(state_dict, prefix, *rest)

    @mig.declare({2: [mig.rename("old", "new")]})
    class Net(Scaled):
        pass

    class Derived(Net):
        pass

    loaded = []
    for cls in (Net, Derived):
        model, state = cls(), cls().state_dict()
        state.clear()
        state[saved] = torch.ones(1)
        state._metadata[""]["version"] = 1 if saved == "old" else 2
        if load == "method":
            model.load_state_dict(state)
        else:
            modkit.load_state_dict(model, state)
        loaded.append(model.new.item())

    assert loaded == [10.0, 10.0]


def test_a_derived_layer_migrates_as_its_base_does(impl):
    """A layer with a loader of torch's own keeps it: BatchNorm's old files get a counter."""

    @mig.declare({3: [mig.rename("gamma", "weight"), mig.rename("beta", "bias")]})
    class Norm(torch.nn.BatchNorm1d, impl.nn.Module):
        pass

    reference = torch.nn.BatchNorm1d(2)
    old = dict(reference.state_dict(), gamma=torch.ones(2) * 3, beta=torch.ones(2))
    for name in ("weight", "bias", "num_batches_tracked"):
        del old[name]
    given = OrderedDict(old)
    given._metadata = {"": {"version": 1}}
    model = Norm(2)

    model.load_state_dict(given)

    assert model.weight.tolist() == [3.0, 3.0]
    assert model.num_batches_tracked.item() == 0


def test_a_hook_or_a_class_that_takes_part(impl):
    """Each module migrates when it is loaded, before its hooks."""
    old = network(impl.nn, old_attention(impl.nn)).state_dict()
    model = network(impl.nn, new_attention(impl.nn))
    seen = []
    model.blocks[0].register_load_state_dict_pre_hook(
        lambda module, entries, prefix, *rest: seen.append(sorted(entries))
    )

    model.load_state_dict(old)

    assert seen[0] == sorted(f"blocks.0.{n}" for n in model.blocks[0].state_dict())
    assert equal(model.state_dict(), joined(old))


def moving(nn):
    """Return a sequence whose children have moved by one place, and its square child class."""
    cls = square(nn)

    @mig.declare({2: [mig.rename("1.**", "2.**"), mig.rename("0.**", "1.**")]})
    class Layers(nn.Module):
        def __init__(self):
            super().__init__()
            for number in (1, 2):
                self.add_module(str(number), cls())

    return Layers


def test_a_hook_gives_a_child_its_old_names(impl):
    """A hook of a parent may move old entries below a declared child, which then migrates them."""

    @mig.declare({2: [mig.rename("old", "new")]})
    class Leaf(impl.nn.Module):
        def __init__(self):
            super().__init__()
            self.new = torch.nn.Parameter(torch.zeros(1))

    def move(module, state_dict, prefix, *args):
        state_dict[f"{prefix}leaf.old"] = state_dict.pop(f"{prefix}old")

    class Parent(impl.nn.Module):
        def __init__(self):
            super().__init__()
            self.leaf = Leaf()
            self.register_load_state_dict_pre_hook(move)

    for load in (Parent.load_state_dict, modkit.load_state_dict, modkit.load_matching):
        model = Parent()
        load(model, {"old": torch.ones(1)})

        assert model.leaf.new.item() == 1.0


def test_moved_children_whose_versions_cannot_be_found(impl):
    """A moved child is handed the version of its present path: refused, with the way out."""
    model = moving(impl.nn)()
    value = torch.rand(2, 2)
    old = OrderedDict({"0.w": value, "1.w": value})
    old._metadata = {"": {"version": 1}, "0": {"version": 1}, "1": {"version": 2}}

    with pytest.raises(
        RuntimeError, match=r"1: Square was saved as 0, .* migrate\(model, state_dict"
    ):
        model.load_state_dict(old)
    model.load_state_dict(mig.migrate(model, old))

    assert torch.equal(model.get_submodule("1").w, value.t())


def test_a_moved_child_whose_loader_has_no_hash():
    """Its class migrates by an object that compares by value, and so its version counts."""

    class Loader:
        __hash__ = None

        def __eq__(self, other):
            return isinstance(other, Loader)

        def __get__(self, instance, owner=None):
            """Return the method of an instance, and else the object."""
            method = torch.nn.Module._load_from_state_dict
            return self if instance is None else method.__get__(instance)

    class Child(torch.nn.Linear):
        _version = 2
        _load_from_state_dict = Loader()

    @mig.declare({2: [mig.rename("old.**", "new.**")]})
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.new = Child(1, 1)

    old = OrderedDict({"old.weight": torch.ones(1, 1), "old.bias": torch.ones(1)})
    old._metadata = {"": {"version": 1}, "old": {"version": 1}}

    with pytest.raises(RuntimeError, match="new: Child was saved as old"):
        Net().load_state_dict(old)


def test_the_present_version_migrates_nothing(impl, monkeypatch):
    """No class looks at entries of the present version."""
    model = network(impl.nn, new_attention(impl.nn))
    monkeypatch.setattr(declarations, "_migrate_own", None)

    assert model.load_state_dict(model.state_dict()).missing_keys == []


def test_partial_state_dicts_keep_what_they_do_not_name(impl):
    """``strict=False`` with a part of a present state dict fills nothing with defaults."""
    model = network(impl.nn, new_attention(impl.nn))
    before = model.blocks[0].scale.tolist()

    model.load_state_dict({"blocks.0.qkv.bias": torch.zeros(12)}, strict=False)

    assert model.blocks[0].scale.tolist() == before
    assert model.blocks[0].qkv.bias.tolist() == [0.0] * 12


def test_a_step_runs_once_where_a_base_declares_too(impl):
    """The loader of a derived class and that of its base migrate the entries once."""

    @mig.declare({2: [mig.convert("w", lambda w: w * 2)]})
    class Base(impl.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.zeros(1))

    @mig.declare({3: [mig.convert("w", lambda w: w * 3)]})
    class Derived(Base):
        pass

    old = OrderedDict(w=torch.ones(1))
    old._metadata = {"": {"version": 1}}
    model = Derived()

    model.load_state_dict(old)

    assert model.w.item() == 6.0


def test_an_instance_with_a_version_of_its_own(impl):
    """A newer ``_version`` of the instance, which torch saves, changes nothing in the steps."""

    @mig.declare({2: [mig.rename("old", "new")]})
    class Net(impl.nn.Module):
        def __init__(self):
            super().__init__()
            self._version = 3
            self.new = torch.nn.Parameter(torch.zeros(1))

    for name in ("old", "new"):
        model = Net()
        model.load_state_dict({name: torch.ones(1)})

        assert model.new.item() == 1.0
        assert model.state_dict()._metadata[""] == {"version": 3}


def test_renamed_layers_of_other_sizes(impl):
    """Without a version, an old name decides; the size is an error of loading, as for any layer."""

    @mig.declare({2: [mig.rename("fc.*", "out.*")]})
    class Head(impl.nn.Module):
        def __init__(self):
            super().__init__()
            self.out = torch.nn.Linear(2, 3)

    old = {"fc.weight": torch.ones(5, 2), "fc.bias": torch.ones(5)}

    with pytest.raises(RuntimeError, match=r"size mismatch for out\.weight: .*\[5, 2\]"):
        Head().load_state_dict(old)
    assert set(mig.migrate(Head(), old)) == {"out.weight", "out.bias"}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_renamed_quantized_layers_are_refused():
    """They load by their version, which is at the old path; the error says what to load."""

    class Old(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.query = torch.nn.Linear(4, 4)

    @mig.declare({2: [mig.rename("query.**", "q.**")]})
    class New(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.q = torch.nn.Linear(4, 4)

    def quantized(cls):
        model = torch.nn.Sequential(cls())
        return torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear})

    old = quantized(Old).state_dict()
    model = quantized(New)
    for load in (torch.nn.Module.load_state_dict, modkit.load_state_dict):
        with pytest.raises(
            RuntimeError, match=r"0\.q: Linear was saved as 0\.query, .* migrate\(model, state_dict"
        ):
            load(model, old)
        assert load(model, mig.migrate(model, old)).missing_keys == []

    packed = "0.{}._packed_params._packed_params"
    weight, bias = model.state_dict()[packed.format("q")]
    assert torch.equal(weight.dequantize(), old[packed.format("query")][0].dequantize())
    assert torch.equal(bias, old[packed.format("query")][1])


def test_old_names_behind_a_prefix():
    """Once the prefix is removed, the names are those of an older version, which migrates."""

    @mig.declare({2: [mig.rename("query.*", "q.*"), mig.rename("key.*", "k.*")]})
    class Old(modkit.nn.Module):
        def __init__(self):
            super().__init__()
            self.q = modkit.nn.Linear(4, 4)
            self.k = modkit.nn.Linear(4, 4)

    model = torch.nn.Sequential(Old(), Old())
    old = mig.migrate(model, model.state_dict(), to={Old: 1})
    for prefix in ("module.", "bert.", "student.encoder."):
        state = {prefix + name: value for name, value in old.items()}
        with pytest.raises(RuntimeError, match="Missing key"):
            modkit.load_state_dict(model, state)

        assert modkit.load_matching(model, state, strip=prefix).missing == []


@mig.declare({2: [mig.rename("old", "new")]})
class Pickled(torch.nn.Module):
    """A declared class at the top of a module."""

    def __init__(self):
        super().__init__()
        self.new = torch.nn.Parameter(torch.ones(1))


def test_declared_modules_can_be_pickled():
    """A module of a declared class is pickled by reference to the class."""
    copied = pickle.loads(pickle.dumps(Pickled()))

    copied.load_state_dict({"old": torch.zeros(1)})

    assert copied.new.item() == 0.0
