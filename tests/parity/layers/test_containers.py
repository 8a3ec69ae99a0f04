import operator
from collections import OrderedDict

import pytest
import torch

from tests.helpers import MODKIT, TORCH
from tests.parity.layers.samples import both


def _layers(impl, sizes=(2, 3, 4)):
    return [impl.nn.Linear(2, size) for size in sizes]


def _entries(module):
    return [
        (name, type(child).__name__, child.out_features) for name, child in module.named_children()
    ]


SEQUENCES = {
    "getitem": lambda s: s[1],
    "getitem_negative": lambda s: s[-1],
    "getitem_index_object": lambda s: s[torch.tensor(1)],
    "getitem_too_large": lambda s: s[3],
    "getitem_text": lambda s: s["1"],
    "slice": lambda s: (type(s[1:]).__name__, _entries(s[1:])),
    "slice_step": lambda s: _entries(s[::-2]),
    "setitem": lambda s: (s.__setitem__(1, torch.nn.Linear(2, 9)), _entries(s)),
    "setitem_too_large": lambda s: s.__setitem__(3, torch.nn.Linear(2, 9)),
    "setitem_none": lambda s: (s.__setitem__(1, None), list(s)),
    "setitem_number": lambda s: s.__setitem__(1, 5),
    "delitem": lambda s: (s.__delitem__(0), _entries(s)),
    "delitem_slice": lambda s: (s.__delitem__(slice(0, 2)), _entries(s)),
    "delitem_too_large": lambda s: s.__delitem__(7),
    "append": lambda s: (s.append(torch.nn.Linear(2, 9)) is s, _entries(s)),
    "append_number": lambda s: s.append(5),
    "insert": lambda s: (s.insert(1, torch.nn.Linear(2, 9)) is s, _entries(s)),
    "insert_negative": lambda s: (s.insert(-1, torch.nn.Linear(2, 9)) is s, _entries(s)),
    "insert_far": lambda s: (s.insert(9, torch.nn.Linear(2, 9)), _entries(s)),
    "insert_number": lambda s: (s.insert(0, 5), len(s)),
    "extend": lambda s: (s.extend(_layers(TORCH, (7, 8))) is s, _entries(s)),
    "extend_itself": lambda s: (s.extend(list(s)), _entries(s)),
    "extend_number": lambda s: s.extend(5),
    "pop": lambda s: (s.pop(0), _entries(s)),
    "pop_last": lambda s: (s.pop(-1), _entries(s)),
    "pop_slice": lambda s: (s.pop(slice(0, 2)), _entries(s)),
    "len": len,
    "iter": list,
    "contains": lambda s: (s[0] in s, torch.nn.ReLU() in s),
    "reversed": lambda s: list(reversed(s)),
    "bool": bool,
    "dir": lambda s: [name for name in dir(s) if name.isdigit()],
    "repr": repr,
    "add_list": lambda s: operator.add(s, [torch.nn.Linear(2, 9)]),
    "add_number": lambda s: s + 5,
    "mul": lambda s: s * 2,
    "rmul": lambda s: 2 * s,
    "mul_zero": lambda s: s * 0,
    "mul_text": lambda s: s * "2",
    "call": lambda s: s(torch.ones(1, 2)),
    "state": lambda s: dict(s.state_dict()),
}


@pytest.mark.parametrize("container", ["Sequential", "ModuleList"])
@pytest.mark.parametrize("operation", SEQUENCES)
def test_sequence_operation(container, operation):
    """A container of modules does with each operation of a sequence what torch's does."""

    def scenario(impl):
        made = getattr(impl.nn, container)
        layers = _layers(impl)
        return SEQUENCES[operation](made(*layers) if container == "Sequential" else made(layers))

    expected, actual = both(scenario)

    assert actual == expected


AUGMENTED = {
    "iadd_same": "s += type(s)(*[s[0]]) if sequential else type(s)([s[0]])",
    "iadd_list": "s += [s[0], s[1]]",
    "iadd_number": "s += 5",
    "imul": "s *= 3",
    "imul_zero": "s *= 0",
    "imul_text": "s *= 'a'",
}


@pytest.mark.parametrize("container", ["Sequential", "ModuleList"])
@pytest.mark.parametrize("operation", AUGMENTED)
def test_augmented_assignment(container, operation):
    """Augmented assignments change the container in place, or fail, as in torch."""

    def scenario(impl):
        made = getattr(impl.nn, container)
        sequential = container == "Sequential"
        names = {
            "s": made(*_layers(impl)) if sequential else made(_layers(impl)),
            "sequential": sequential,
        }
        before = names["s"]
        exec(AUGMENTED[operation], names)
        return names["s"] is before, _entries(names["s"])

    expected, actual = both(scenario)

    assert actual == expected


def test_sum_of_sequentials_is_of_the_same_library(impl):
    """Adding and multiplying give a plain Sequential of the library that was used."""

    class Own(impl.nn.Sequential):
        pass

    own = Own(*_layers(impl))

    assert type(own + own) is impl.nn.Sequential
    assert type(own * 2) is impl.nn.Sequential
    assert type(2 * own) is impl.nn.Sequential
    assert type(own[1:]) is Own
    assert list(own + own) == [*own, *own]


def test_sum_of_lists_is_of_the_same_library(impl):
    """Adding to a ModuleList gives a plain ModuleList of the library that was used."""
    layers = impl.nn.ModuleList(_layers(impl))
    others = [impl.nn.ReLU()]
    more = layers + others

    assert type(more) is impl.nn.ModuleList
    assert list(more)[:3] == list(layers)
    assert type(layers[1:]) is impl.nn.ModuleList


def test_sum_keeps_elements_of_the_other_library():
    """The elements of a sum are the objects that were put in, whatever their class."""
    stranger = torch.nn.Linear(2, 3)
    total = MODKIT.nn.Sequential(stranger) + torch.nn.Sequential(stranger)

    assert list(total) == [stranger, stranger]
    assert type(stranger) is torch.nn.Linear


def test_sequential_of_ordered_names():
    """An OrderedDict names the children; slices keep the names."""

    def scenario(impl):
        made = impl.nn.Sequential(OrderedDict(zip("abc", _layers(impl))))
        return _entries(made), _entries(made[1:]), made.a, repr(made)

    expected, actual = both(scenario)

    assert actual == expected


MAPPINGS = {
    "getitem": lambda d: d["b"],
    "getitem_missing": lambda d: d["x"],
    "setitem": lambda d: (d.__setitem__("x", torch.nn.Linear(2, 9)), list(d)),
    "setitem_dotted": lambda d: d.__setitem__("x.y", torch.nn.Linear(2, 9)),
    "setitem_empty": lambda d: d.__setitem__("", torch.nn.Linear(2, 9)),
    "setitem_method": lambda d: d.__setitem__("keys", torch.nn.Linear(2, 9)),
    "setitem_number": lambda d: d.__setitem__("x", 5),
    "setitem_by_number": lambda d: d.__setitem__(5, torch.nn.Linear(2, 9)),
    "delitem": lambda d: (d.__delitem__("b"), list(d)),
    "delitem_missing": lambda d: d.__delitem__("x"),
    "contains": lambda d: ("a" in d, "x" in d),
    "keys": lambda d: list(d.keys()),
    "items": lambda d: list(d.items()),
    "values": lambda d: list(d.values()),
    "pop": lambda d: (d.pop("a"), list(d)),
    "pop_missing": lambda d: d.pop("x"),
    "clear": lambda d: (d.clear(), len(d)),
    "update_dict": lambda d: (d.update({"z": torch.nn.ReLU(), "y": torch.nn.ReLU()}), list(d)),
    "update_itself": lambda d: (d.update(d), list(d)),
    "update_pairs": lambda d: (d.update([("z", torch.nn.ReLU())]), list(d)),
    "update_short_pairs": lambda d: d.update([("z",)]),
    "update_numbers": lambda d: d.update([1]),
    "update_number": lambda d: d.update(1),
    "call": lambda d: d(torch.ones(1, 2)),
    "repr": repr,
    "len": len,
    "state": lambda d: dict(d.state_dict()),
}


@pytest.mark.parametrize("operation", MAPPINGS)
def test_module_dict_operation(operation):
    """A ModuleDict does with each operation of a mapping what torch's does."""
    expected, actual = both(
        lambda impl: MAPPINGS[operation](impl.nn.ModuleDict(dict(zip("abc", _layers(impl)))))
    )

    assert actual == expected
