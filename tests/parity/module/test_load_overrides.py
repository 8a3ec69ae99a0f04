import collections
import copy

import pytest
import torch

from tests.cases import for_each
from tests.helpers import Implementation, same
from tests.models import child_leaf, tree


def logging_class(impl: Implementation, log: list[object], **attributes: object) -> type:
    """Build a class that notes with what ``_load_from_state_dict`` was called."""

    class Logged(impl.Module):
        def _load_from_state_dict(self, *args):
            state_dict, prefix, local_metadata, _, *reports = args
            given = (prefix, list(state_dict), type(state_dict).__name__, dict(local_metadata))
            versioned = list(getattr(state_dict, "_metadata", None) or ())
            log.append((*given, versioned, [list(report) for report in reports]))
            super()._load_from_state_dict(*args)

    for name, value in attributes.items():
        setattr(Logged, name, value)
    return Logged


def logged_tree(impl: Implementation, log: list[object]) -> torch.nn.Module:
    """Build three levels of logging modules with prefixes of names among the siblings."""
    kind = logging_class(impl, log, _version=4)
    root = kind()
    root.weight = torch.nn.Parameter(torch.ones(1))
    root.a, root.ab, root.b, root.none = kind(), kind(), kind(), None
    root.add_module("gone", None)
    root.a.weight = torch.nn.Parameter(torch.ones(1))
    root.a.x = kind()
    root.a.x.weight = torch.nn.Parameter(torch.ones(1))
    root.ab.weight = torch.nn.Parameter(torch.ones(1))
    root.b.register_buffer("weight", torch.ones(1))
    root.again = root.b
    return root


# In place of what the save has written; without an entry, a module gets an empty dict.
METADATA = (
    *(..., None, {}, {"": {}}),
    {"": {"version": 1}, "a.x": {"version": 9, "own": 3}},
    {"a": {"version": 2}, "unknown": {"version": 1}},
)


@for_each("assign", [False, True])
@for_each("shuffled", [False, True])
@for_each("extra", [[], ["bogus"], ["a.bogus", "abc.weight", "a.x.y.z"]])
@for_each("metadata", METADATA)
def test_what_each_module_is_given(metadata, extra, shuffled, assign):
    """Each module gets its own keys, in the given order, its metadata and the shared lists."""

    def scenario(impl):
        log = []
        module = logged_tree(impl, log)
        saved = module.state_dict()
        for key in extra:
            saved[key] = torch.ones(1)
        items = reversed(saved.items()) if shuffled else saved.items()
        state = collections.OrderedDict(items)
        if metadata is not None:
            # A copy, since torch leaves whether it assigned in what it is given.
            state._metadata = saved._metadata if metadata is ... else copy.deepcopy(metadata)
        result = module.load_state_dict(state, strict=False, assign=assign)
        return log, result

    assert same(scenario)[0] == "returned"


def test_loading_one_module_by_hand():
    """``_load_from_state_dict`` can be called alone, with positional or keyword arguments."""

    def scenario(impl):
        module = tree(impl).right
        found = []
        for strict in (True, False):
            missing, unexpected, errors = [], [], []
            state = {
                "p.weight": torch.zeros(2, 3),
                "p.bogus": 1,
                "p._extra_state": 4,
                "other": 2,
                "p.mean": torch.ones(1),
            }
            module._load_from_state_dict(
                state,
                "p.",
                {},
                strict=strict,
                missing_keys=missing,
                unexpected_keys=unexpected,
                error_msgs=errors,
            )
            found.append((missing, unexpected, errors, list(state), module.weight))
        return found

    assert same(scenario)[0] == "returned"


@for_each("names", [("a.b", "a"), ("a", "a.b"), ("", "a"), ("a b", "a")])
def test_children_with_odd_names(names):
    """Children under dotted or empty names, set by assignment, load what torch gives them."""

    def scenario(impl):
        root = impl.Module()
        for number, name in enumerate(names):
            child = child_leaf(impl)
            child.b = child_leaf(impl)
            child.number = number
            setattr(root, name, child)
        keys = list(root.state_dict())
        state = {key: torch.full((1,), float(value)) for value, key in enumerate(keys)}
        result = root.load_state_dict(state, strict=False)
        return keys, result, [parameter.item() for parameter in root.parameters()]

    assert same(scenario)[0] == "returned"


@pytest.mark.filterwarnings("ignore:.*loaded none of the")
@pytest.mark.parametrize("kind", ["hook", "override"])
def test_hooks_and_overrides_are_always_told_strict(impl: Implementation, kind: str) -> None:
    """Also in a load that is not, and the result lists the keys."""
    told = []

    class Overriding(impl.own.Linear):
        def _load_from_state_dict(self, state_dict, prefix, metadata, strict, *lists):
            told.append(strict)
            super()._load_from_state_dict(state_dict, prefix, metadata, strict, *lists)

    model = impl.own.Sequential(Overriding(1, 1) if kind == "override" else impl.own.Linear(1, 1))
    if kind == "hook":
        model[0].register_load_state_dict_pre_hook(
            lambda module, state_dict, prefix, metadata, strict, *lists: told.append(strict)
        )
    result = model.load_state_dict({"0.stray": torch.zeros(1)}, strict=False)

    assert told == [True]
    assert result.missing_keys == ["0.weight", "0.bias"]
    assert result.unexpected_keys == ["0.stray"]


@for_each("version", [1, 2, 3, None, (1, 2)])
@for_each("written", [1, 2, None])
@for_each("own", ["class", "instance"])
def test_a_layer_with_another_version_migrates_as_the_class_behind_it(version, written, own):
    """BatchNorm adds its counter to entries of a version below 2, which need not be its own."""

    def scenario(impl: Implementation):
        class Norm(impl.nn.BatchNorm1d):
            """A layer whose versions are counted anew."""

        model = impl.own.Sequential(Norm(2))
        setattr(Norm if own == "class" else model[0], "_version", version)
        state = model.state_dict()
        del state["0.num_batches_tracked"]
        if written is not None:
            state._metadata["0"]["version"] = written
        return repr(model.load_state_dict(state)), sorted(state)

    is_old = (written or version) in {None, 1}
    assert same(scenario)[0] == ("returned" if is_old else "raised")


@for_each("strict", [True, False])
@for_each("assign", [False, True])
@for_each("child", ["none of that name", "None", "without the name", "with the name"])
@for_each("keys", [["a.b"], ["a.b", "bogus"], ["bogus.c", "a.b", "c"], ["inner.a.b", "a.b"], []])
def test_a_parameter_whose_name_holds_a_dot(keys, child, assign, strict):
    """Its key loads it, and is unexpected unless there is a child that it may belong to."""

    def scenario(impl):
        module = impl.Module()
        if child == "None":
            module.a = None
        elif child != "none of that name":
            module.a = impl.Module()
            name = "b" if child == "with the name" else "c"
            module.a.register_parameter(name, torch.nn.Parameter(torch.ones(1)))
        module.inner = impl.Module()
        for owner in (module, module.inner):
            owner._parameters["a.b"] = torch.nn.Parameter(torch.ones(1))
        state = {key: torch.full((1,), 7.0) for key in keys}
        try:
            result = module.load_state_dict(state, strict, assign)
        except RuntimeError as error:
            result = str(error)
        return result, [parameter.item() for parameter in module.parameters()]

    assert same(scenario)[0] == "returned"


def test_a_dict_of_a_child_is_its_own(impl: Implementation) -> None:
    """Entries that a child removes or adds are visible to its children only."""
    seen = {}

    class Editing(impl.Module):
        def _load_from_state_dict(self, state_dict, prefix, *args):
            seen[prefix] = list(state_dict)
            for key in list(state_dict):
                if key.endswith("drop"):
                    del state_dict[key]
            state_dict[prefix + "inner.added"] = torch.ones(1)
            super()._load_from_state_dict(state_dict, prefix, *args)

    root = Editing()
    root.a, root.b = Editing(), Editing()
    root.a.inner = Editing()
    checkpoint = {"drop": 1, "a.drop": 2, "a.inner.drop": 3, "b.drop": 4, "b.keep": 5}
    root.load_state_dict(checkpoint, strict=False)

    assert seen["a."] == []
    assert seen["a.inner."] == ["a.inner.added"]
    assert seen["b."] == ["b.keep"]
    assert len(checkpoint) == 5


@for_each("failing", ["", "load", "set", "missing"])
def test_extra_state_comes_after_the_members(failing):
    """`set_extra_state` gets the saved object last; what an override raises passes through."""

    def scenario(impl):
        log = []

        class Extra(impl.Module):
            def __init__(self):
                super().__init__()
                self.weight = torch.nn.Parameter(torch.zeros(1))

            def get_extra_state(self):
                return {"made": 1}

            def set_extra_state(self, state):
                log.append((state, self.weight.item()))
                if failing == "set":
                    raise ValueError(f"bad state {state}")

            def _load_from_state_dict(self, *args):
                if failing == "load":
                    raise ValueError("of the override")
                super()._load_from_state_dict(*args)

        root = impl.Module()
        root.child = Extra()
        state = {"child.weight": torch.ones(1), "child._extra_state": {"made": 2}}
        if failing == "missing":
            del state["child._extra_state"]
        root.load_state_dict(state)
        return log

    assert same(scenario)[0] == ("raised" if failing else "returned")


TABLES = (
    *("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"),
    *("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
)


@for_each("table", TABLES)
@for_each("below", [False, True])
@for_each("assign", [False, True])
def test_a_module_that_lacks_a_table(table: str, below: bool, assign: bool) -> None:
    """The error names the attribute, and the table may be one of the class."""

    def scenario(impl):
        outcomes = []
        for of_the_class in (False, True):
            module = tree(impl)
            state = module.state_dict()
            part = module.left if below else module
            value = part.__dict__.pop(table)
            if of_the_class:
                setattr(type(part), table, value)
            try:
                outcomes.append(module.load_state_dict(state, assign=assign))
            except (AttributeError, RuntimeError) as error:
                outcomes.append((type(error).__name__, str(error)))
        return outcomes

    assert same(scenario)[0] == "returned"
