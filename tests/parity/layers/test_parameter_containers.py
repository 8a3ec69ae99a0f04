import copy
import pickle
from collections import OrderedDict

import pytest
import torch

from tests.parity.layers.samples import both


def _values():
    return [
        torch.zeros(2),
        torch.nn.Parameter(torch.ones(3)),
        "text",
        torch.nn.Parameter(torch.ones(1), False),
    ]


LISTS = {
    "getitem": lambda p: p[1],
    "getitem_negative": lambda p: p[-2],
    "getitem_too_large": lambda p: p[4],
    "slice": lambda p: (type(p[1:]).__name__, list(p[1:])),
    "slice_step": lambda p: list(p[::2]),
    "setitem": lambda p: (p.__setitem__(0, torch.ones(5)), list(p)),
    "setitem_text": lambda p: (p.__setitem__(2, "other"), list(p)),
    "setitem_parameter_by_text": lambda p: (p.__setitem__(1, "other"), list(p)),
    "setitem_too_large": lambda p: p.__setitem__(9, torch.ones(5)),
    "append": lambda p: (p.append(torch.ones(2)) is p, list(p)),
    "extend": lambda p: (p.extend([torch.ones(2), 5]) is p, list(p)),
    "extend_itself": lambda p: (p.extend(list(p)), len(p)),
    "extend_tensor": lambda p: p.extend(torch.ones(2)),
    "iadd": lambda p: (p.__iadd__([torch.ones(2)]) is p, list(p)),
    "len": len,
    "parameters": lambda p: list(p.named_parameters()),
    "dir": lambda p: [name for name in dir(p) if name.isdigit()],
    "repr": repr,
    "call": lambda p: p(),
    "state": lambda p: dict(p.state_dict()),
    "pickle": lambda p: list(pickle.loads(pickle.dumps(p))),
    "deepcopy": lambda p: (type(copy.deepcopy(p)).__name__, list(copy.deepcopy(p))),
    "double": lambda p: list(p.double()),
}


@pytest.mark.parametrize("operation", LISTS)
def test_parameter_list_operation(operation):
    """A ParameterList does with each operation of a list what torch's does."""
    expected, actual = both(lambda impl: LISTS[operation](impl.nn.ParameterList(_values())))

    assert actual == expected


DICTS = {
    "getitem": lambda p: p["b"],
    "getitem_missing": lambda p: p["x"],
    "getitem_number": lambda p: p[1],
    "setitem": lambda p: (p.__setitem__("x", torch.ones(5)), list(p.items())),
    "setitem_number": lambda p: p.__setitem__(1, torch.ones(5)),
    "delitem": lambda p: (p.__delitem__("b"), list(p)),
    "delitem_missing": lambda p: p.__delitem__("x"),
    "contains": lambda p: ("a" in p, "x" in p),
    "reversed": lambda p: list(reversed(p)),
    "keys": lambda p: list(p.keys()),
    "values": lambda p: list(p.values()),
    "items": lambda p: list(p.items()),
    "get": lambda p: (p.get("a"), p.get("x"), p.get("x", 3)),
    "setdefault": lambda p: (p.setdefault("a", 5), p.setdefault("x", torch.ones(1)), list(p)),
    "pop": lambda p: (p.pop("a"), list(p)),
    "pop_missing": lambda p: p.pop("x"),
    "popitem": lambda p: (p.popitem(), list(p)),
    "clear": lambda p: (p.clear(), len(p)),
    "copy": lambda p: (p.copy() is p, p.copy()["b"] is p["b"], list(p.copy().items())),
    "fromkeys": lambda p: list(p.fromkeys(["x", "y"], torch.ones(1)).items()),
    "fromkeys_none": lambda p: list(p.fromkeys(["x"]).items()),
    "update_dict": lambda p: (p.update({"z": torch.ones(1), "y": 3}), list(p)),
    "update_ordered": lambda p: (p.update(OrderedDict(z=torch.ones(1), y=3)), list(p)),
    "update_pairs": lambda p: (p.update([("z", 3)]), list(p)),
    "update_short_pairs": lambda p: p.update([("z",)]),
    "update_number": lambda p: p.update(5),
    "or": lambda p: list((p | {"x": torch.ones(1)}).items()),
    "or_itself": lambda p: list((p | p).items()),
    "ror": lambda p: list(({"x": torch.ones(1)} | p).items()),
    "ior": lambda p: (p.__ior__({"x": torch.ones(1)}) is p, list(p)),
    "or_number": lambda p: p | 5,
    "repr": repr,
    "call": lambda p: p(5),
    "state": lambda p: dict(p.state_dict()),
    "pickle": lambda p: list(pickle.loads(pickle.dumps(p)).items()),
}


@pytest.mark.parametrize("operation", DICTS)
def test_parameter_dict_operation(operation):
    """A ParameterDict does with each operation of a mapping what torch's does."""
    expected, actual = both(
        lambda impl: DICTS[operation](impl.nn.ParameterDict(dict(zip("abcd", _values()))))
    )

    assert actual == expected


def test_results_are_of_the_same_library(impl):
    """Copies, slices and unions are plain containers of the library that was used."""

    class OwnDict(impl.nn.ParameterDict):
        pass

    class OwnList(impl.nn.ParameterList):
        pass

    own = OwnDict({"a": torch.ones(1)})
    made = [own.copy(), own.fromkeys("ab"), own | {"b": torch.ones(1)}]

    assert [type(result) for result in made] == [impl.nn.ParameterDict] * 3
    assert type(OwnList([torch.ones(1)])[:1]) is OwnList
    assert all(result.__module__ == "torch.nn.modules.container" for result in made)
