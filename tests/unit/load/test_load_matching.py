import copy
import sys
from collections import UserDict

import pytest
import torch

import modkit
import modkit.nn
from modkit import migrations as mig
from tests.cases import for_each


OURS, THEIRS = modkit.nn.Module, torch.nn.Module
every_base = for_each("base", [OURS, THEIRS], ids=["modkit", "torch"])


def network(base, classes=3):
    """Build a network with a body, a head, buffers and a tied parameter."""

    class Net(base):
        def __init__(self):
            super().__init__()
            self.body = torch.nn.Linear(4, 4)
            self.norm = torch.nn.BatchNorm1d(4)
            self.head = torch.nn.Linear(4, classes)
            self.tied = self.body.weight
            self.register_buffer("scratch", torch.zeros(1), persistent=False)

    return Net()


def other(model, prefix=""):
    """Return a state dict with other values than the model has, without the tied name."""
    return {
        prefix + name: tensor + 1 for name, tensor in model.state_dict().items() if name != "tied"
    }


def values(model):
    """Copy all tensors of a model."""
    return copy.deepcopy(dict(model.state_dict()))


def equal(model, before):
    """Return True if the tensors of a model have these values."""
    return all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@every_base
def test_another_number_of_classes(base):
    """The body is loaded; the head is left out, with both shapes."""
    model = network(base, classes=5)
    head = copy.deepcopy(model.head.state_dict())
    state = other(network(base))
    matched = modkit.load_matching(model, state)

    assert isinstance(matched.loaded, list)
    assert "body.weight" in matched.loaded
    assert {"norm.running_mean", "norm.num_batches_tracked"} < {*matched.loaded}
    assert matched.skipped == {
        "head.weight": "shape [3, 4], the model has [5, 4]",
        "head.bias": "shape [3], the model has [5]",
    }
    # A tied parameter is loaded by any of its names.
    assert matched.missing == ["head.weight", "head.bias"]
    assert torch.equal(model.body.weight, state["body.weight"])
    assert model.tied is model.body.weight
    assert all(torch.equal(model.head.state_dict()[name], head[name]) for name in head)


@every_base
def test_everything_fits(base):
    """It loads what ``load_state_dict`` loads."""
    model, twin = network(base), network(base)
    state = other(model)
    matched = modkit.load_matching(model, state)
    twin.load_state_dict({**state, "tied": state["body.weight"]})

    assert equal(model, twin.state_dict())
    assert (matched.skipped, matched.missing) == ({}, [])
    assert repr(matched) == f"Matched: {len(matched.loaded)} loaded, 0 skipped, 0 missing"


@for_each(
    ("prefix", "strip"),
    [
        ("module.", "module."),
        ("module._orig_mod.", ["module.", "_orig_mod."]),
        ("module.", ("absent.", "module.")),
        ("", None),
        ("", "module."),
    ],
)
def test_prefixes(prefix, strip):
    """One or several are removed from the beginning of names that have them."""
    model = network(OURS)
    state = other(model, prefix)
    matched = modkit.load_matching(model, state, strip=strip)

    assert matched.missing == []
    assert torch.equal(model.head.bias, state[f"{prefix}head.bias"])


@for_each(
    "rename",
    [
        {"classifier": "head", "classifier.bias": "head.bias"},
        {"classifier.weight": "head.weight", "classifier.bias": "head.bias"},
        lambda name: name.replace("classifier", "head"),
    ],
    ids=["parts", "names", "function"],
)
def test_renames(rename):
    """A mapping renames whole parts of names, the longest one first; a function gets the name."""
    model = network(OURS)
    state = {name.replace("head", "classifier"): t for name, t in other(model, "m.").items()}
    matched = modkit.load_matching(model, state, strip="m.", rename=rename)

    assert matched.missing == []
    assert torch.equal(model.head.weight, state["m.classifier.weight"])


def test_parts_of_names_are_whole():
    """``head`` is not ``header``."""
    model = torch.nn.ModuleDict({"head": torch.nn.Linear(1, 1), "header": torch.nn.Linear(1, 1)})
    state = {"top.weight": torch.ones(1, 1), "topper.weight": torch.ones(1, 1)}
    matched = modkit.load_matching(model, state, rename={"top": "head"})

    assert matched.loaded == ["head.weight"]
    assert matched.skipped == {"topper.weight": "not in the model"}


@every_base
def test_nothing_fits(base):
    """The error says why, and nothing has changed."""
    model = network(base)
    before = values(model)
    with pytest.raises(
        modkit.errors.NameMismatchError, match="no entry of the state dict"
    ) as error:
        modkit.load_matching(model, other(network(base), "module."))

    assert equal(model, before)
    assert "module.body.weight" in error.value.unexpected
    assert "body.weight" in error.value.missing
    if sys.version_info >= (3, 11):
        assert "'module.'" in error.value.__notes__[0]


@for_each("state", [{}, {"epoch": 3}, {"body.weight": torch.ones(7, 7)}, {1: torch.ones(1)}])
def test_state_dicts_of_which_nothing_fits(state):
    """Loading nothing is an error."""
    with pytest.raises(modkit.errors.NameMismatchError):
        modkit.load_matching(network(OURS), state)


def test_entries_that_are_not_tensors():
    """They are skipped, and keys that are not strings, too."""
    model = network(OURS)
    state = {"body.bias": torch.ones(4), "head.bias": "text", "epoch": 3, 5: torch.ones(1)}
    matched = modkit.load_matching(model, state)

    assert matched.loaded == ["body.bias"]
    assert matched.skipped == {
        "head.bias": "not a tensor: str",
        "epoch": "not in the model",
        "5": "its key is not a string",
    }


def test_names_that_would_be_one():
    """Two entries for one name are refused before the first write."""
    model = network(OURS)
    before = values(model)
    state = {**other(model), **other(model, "module.")}
    with pytest.raises(
        ValueError, match=r"'body\.weight', 'module\.body\.weight' would all be renamed to"
    ):
        modkit.load_matching(model, state, strip="module.")

    assert equal(model, before)


def test_a_rename_of_nothing():
    """A name in ``rename`` that no entry has is a typing error."""
    with pytest.raises(ValueError, match="rename has 'haed', which is not a name"):
        modkit.load_matching(network(OURS), other(network(OURS)), rename={"haed": "head"})


def test_a_prefix_is_renamed_to_nothing():
    """Its dot stays, and the note says so."""
    net = torch.nn.Sequential(torch.nn.Linear(2, 2))
    with pytest.raises(modkit.errors.NameMismatchError, match=r"unexpected: \.0\.w") as error:
        modkit.load_matching(net, other(net, "old."), rename={"old": ""})

    if sys.version_info >= (3, 11):
        assert "extra prefix '.'" in error.value.__notes__[0]


def test_a_tensor_that_cannot_be_written_changes_nothing():
    """All entries that fit in name and shape are loaded, or none."""
    model = network(OURS)
    # Strides other than those of a new tensor are a reason to try out the copy.
    model.body.weight.data = model.body.weight.data.t()
    before = values(model)
    state = {**other(model), "head.bias": torch.ones(3, device="meta")}
    with pytest.raises(RuntimeError, match=r"head\.bias"):
        modkit.load_matching(model, state)

    assert equal(model, before)


def test_versions_move_with_the_names():
    """A class that migrates old entries sees the version that was saved under the old path."""
    seen = []

    class Versioned(modkit.nn.Module):
        _version = 2

        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))

        def _load_from_state_dict(self, state_dict, prefix, metadata, *args):
            seen.append((prefix, metadata.get("version")))
            if f"{prefix}old" in state_dict:
                state_dict[f"{prefix}weight"] = state_dict.pop(f"{prefix}old")
            super()._load_from_state_dict(state_dict, prefix, metadata, *args)

    saved = torch.nn.Sequential(Versioned()).state_dict(prefix="module.")
    matched = modkit.load_matching(torch.nn.Sequential(Versioned()), saved, strip="module.")

    assert seen == [("0.", 2)]
    assert matched.loaded == ["0.weight"]

    model = torch.nn.Sequential(Versioned())
    matched = modkit.load_matching(model, {"0.old": torch.ones(1)})

    assert matched.loaded == ["0.weight"]
    assert model[0].weight.item() == 1


def test_a_model_with_a_loader_of_its_own():
    """Its ``load_state_dict`` is called."""
    calls = []

    class Own(modkit.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = modkit.nn.Linear(1, 1)

        def load_state_dict(self, state_dict, strict=True, assign=False):
            calls.append([*state_dict])
            return super().load_state_dict(state_dict, strict, assign)

    modkit.load_matching(Own(), {"layer.weight": torch.ones(1, 1), "layer.bias": torch.ones(2)})

    assert calls == [["layer.weight"]]


@every_base
def test_a_mapping_that_reads_its_entries(base):
    """Each entry of a mapping is read once, as from a file."""
    model = network(base)
    tensors, reads = other(model, "net."), []

    class Reading(UserDict):
        def __getitem__(self, key):
            reads.append(key)
            return super().__getitem__(key).clone()

    matched = modkit.load_matching(
        model, Reading({**tensors, "stray": torch.ones(1)}), strip="net."
    )

    assert reads == [*tensors, "stray"]
    assert matched.skipped == {"stray": "not in the model"}
    assert matched.missing == []


@every_base
def test_a_loader_that_returns_nothing(base):
    """The keys are compared, where the model's own ``load_state_dict`` does not return them."""

    class Own(base):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)
            self.other = torch.nn.Linear(1, 1)

        def load_state_dict(self, state_dict, strict=True):
            super().load_state_dict(state_dict, strict)

        def get_extra_state(self):
            return 3

        def set_extra_state(self, state):
            self.loaded = state

    model = Own()
    state = {"layer.weight": torch.ones(1, 1), "layer.bias": torch.ones(2)}
    state |= {"stray": torch.ones(1), "_extra_state": 5}
    matched = modkit.load_matching(model, state)

    assert matched.loaded == ["layer.weight", "_extra_state"]
    assert matched.skipped == {
        "layer.bias": "shape [2], the model has [1]",
        "stray": "not in the model",
    }
    assert matched.missing == ["layer.bias", "other.weight", "other.bias"]
    assert model.loaded == 5


@every_base
def test_a_loader_without_strict(base):
    """Python refuses the call, before anything has been loaded."""

    class Own(base):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def load_state_dict(self, state_dict):
            raise AssertionError

    with pytest.raises(TypeError, match="unexpected keyword argument 'strict'"):
        modkit.load_matching(Own(), {"layer.weight": torch.ones(1, 1)})


def test_the_table():
    """The result shows what was left out, in printable lines of which there are not too many."""
    model = network(OURS, classes=5)
    state = {**other(network(OURS)), "stray\n": torch.ones(1)}
    matched = modkit.load_matching(model, state)

    assert repr(matched) == (
        "Matched: 7 loaded, 3 skipped, 2 missing\n"
        "  skipped  head.weight  shape [3, 4], the model has [5, 4]\n"
        "  skipped  head.bias    shape [3], the model has [5]\n"
        "  skipped  stray\\n      not in the model\n"
        "  missing  head.weight  keeps its value\n"
        "  missing  head.bias    keeps its value"
    )
    many = {f"stray{i}": torch.ones(1) for i in range(100)}
    assert repr(modkit.load_matching(model, {**state, **many})).endswith("\n  and 85 more")


@for_each(
    ("model", "state", "text"),
    [
        ({}, {}, "model must be a torch.nn.Module, got dict"),
        (torch.nn.Linear(1, 1), [], "state_dict must be a mapping, got list"),
    ],
)
def test_wrong_types(model, state, text):
    """The error names the function and what it was given."""
    with pytest.raises(TypeError, match=text):
        modkit.load_matching(model, state)


def test_a_declared_class_migrates_first():
    """A tensor of another shape is skipped, under the present name."""

    @mig.declare({2: [mig.rename("fc.*", "out.*"), mig.merge(["q", "k"], "qk")]})
    class Head(modkit.nn.Module):
        def __init__(self, classes):
            super().__init__()
            self.out = modkit.nn.Linear(4, classes)
            self.qk = modkit.nn.Parameter(torch.zeros(4, 2))

    def model(classes):
        return torch.nn.Sequential(torch.nn.Linear(4, 4), Head(classes))

    old = mig.migrate(model(9), model(9).state_dict(), to={Head: 1})
    for state in (old, dict(old), {f"module.{name}": value for name, value in old.items()}):
        net = model(3)
        matched = modkit.load_matching(net, state, strip="module.")

        assert matched.loaded == ["0.weight", "0.bias", "1.qk"]
        assert matched.skipped == {
            "1.out.weight": "shape [9, 4], the model has [3, 4]",
            "1.out.bias": "shape [9], the model has [3]",
        }
        assert matched.missing == ["1.out.weight", "1.out.bias"]
        assert torch.equal(net[1].qk, torch.cat([old["1.q"], old["1.k"]]))


def test_a_migration_that_is_impossible():
    """The error is that of a load, and nothing has been written."""

    @mig.declare({2: [mig.merge(["q", "k"], "qk")]})
    class Head(modkit.nn.Module):
        def __init__(self):
            super().__init__()
            self.qk = modkit.nn.Parameter(torch.zeros(4, 2))

    head = Head()
    with pytest.raises(modkit.errors.NameMismatchError, match="no entry"):
        modkit.load_matching(head, {"model": {"qk": torch.ones(4, 2)}, 0: "a"})
    with pytest.raises(RuntimeError, match=r"merge q, k -> qk.*but k is missing"):
        modkit.load_matching(head, {"q": torch.ones(2, 2)})

    assert not head.qk.any()


@pytest.mark.filterwarnings("ignore")
def test_what_a_quantized_layer_saves_is_loaded():
    """Scale and packed weights are entries of the model, though not among its tensors."""
    layers = torch.nn.Sequential(torch.nn.Linear(2, 2))
    model = torch.ao.quantization.quantize_dynamic(layers, {torch.nn.Linear})
    state = model.state_dict()

    assert modkit.load_matching(model, state).loaded == [*state]
