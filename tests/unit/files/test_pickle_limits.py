import struct
from collections import Counter, OrderedDict

import numpy as np
import pytest
import torch

import modkit
from modkit.files import pickle_limits
from modkit.files.pickle_limits import memory_bound, most_memory, pickle_problem
from modkit.files.plain_checkpoints import plain_content
from modkit.files.zip_archive import Archive
from tests.cases import for_each
from tests.unit.files.amplification import cost
from tests.unit.files.hostile import ORDERED, called, named, tensor, text
from tests.unit.files.raw_zip import saved


DEEPEST = pickle_limits.DEEPEST


# By name: a function of the depth that returns a pickle of containers in one another.
NESTED = {
    "lists": lambda n: b"]" * (n + 1) + b"a" * n,
    "marked lists": lambda n: b"](" * (n + 1) + b"e" * (n + 1),
    "tuples": lambda n: b")" + b"\x85" * n,
    "marked tuples": lambda n: b"(" * (n + 1) + b"t" * (n + 1),
    "dicts": lambda n: b"}N" * n + b"N" + b"s" * n,
    "with POP": lambda n: b")" + b"\x85N0" * n,
    "with memo": lambda n: b")" + b"\x85q\0h\0" * n,
}


@for_each("kind", NESTED)
@for_each("script", [False, True])
def test_the_deepest_pickle(kind, script):
    """1,000 levels are accepted, one more is refused."""
    pickles = [b"\x80\x02" + NESTED[kind](depth) + b"." for depth in (DEEPEST, DEEPEST + 1)]
    assert pickle_problem(pickles[0], {}, reader="script" if script else "torch") == ""
    problem = pickle_problem(pickles[1], {}, reader="script" if script else "torch")

    assert problem == "it nests deeper than 1,000 levels"


@for_each(
    ("pickled", "problem"),
    [
        # The second list is put into the first, and then a third into the second.
        (b"]q\0]q\1]q\2h\0h\1a0h\1h\2a", "it fills an object that is part of another one already"),
        (b"t" * 2000, "its instructions do not fit together"),
        (b"\x85", "its instructions do not fit together"),
        (b"h\x07a" * 2000, "its instructions do not fit together"),
        (b"I1\n", "it has the instruction INT, which is not read here"),
    ],
)
def test_what_torchs_reader_in_cpp_does_not_follow(pickled, problem):
    """These are refused in a TorchScript archive."""
    assert pickle_problem(b"\x80\x02" + pickled + b".", {}, reader="script") == problem


@for_each("identifier", [b"N", b"K\5", b")", b"NN\x86"])
def test_identifiers_that_are_not_those_of_storages_are_left_to_torch(identifier):
    """Torch has an error for None, a number, and tuples of other lengths."""
    assert pickle_problem(b"\x80\x02" + identifier + b"Q.", {}) == ""


def test_open_marks():
    """Twice as many marks as levels may be open at once."""
    marks = b"(" * (2 * DEEPEST + 1)
    assert pickle_problem(b"\x80\x02" + marks + b"N.", {}) == ""

    assert "nests deeper" in pickle_problem(b"\x80\x02(" + marks + b"N.", {})


def test_the_last_place_of_the_memo():
    """A place may be as large as the pickle is long: torch's reader allocates all below it."""
    size = len(b"\x80\x02Nr\0\0\0\0.")
    for place, problem in ((size, ""), (size + 1, f"it stores an object at place {size + 1}")):
        assert pickle_problem(b"\x80\x02Nr" + struct.pack("<I", place) + b".", {}) == problem


# By name: opcodes with a tuple of 1,000 objects at place 1, and how many objects are hashed.
WORK = {
    "SETITEM": (b"}" + b"h\1Ns" * 50, 50 * 1000),
    "SETITEMS": (b"}(" + b"h\1N" * 50 + b"u", 50 * 1000),
    # The arguments, the list, and each pair with what is in it.
    "pairs": (
        called(named("collections", "OrderedDict"), b"](" + b"h\1N\x86" * 25 + b"e"),
        2 + 1 + 25 * (1002 + 1000 + 1),
    ),
    # The identifier is the tuple in two others, and all three are hashed.
    "identifiers": (b"h\1\x85\x85Q" * 17, 17 * (1002 + 1001 + 1000)),
}


@for_each("case", WORK)
@for_each("fails", [False, True])
def test_the_work_of_hashing(case, fails):
    """Ten hashed objects for each byte, and 10,000, are accepted."""
    hashing, work = WORK[case]
    # The smallest pickle for this work, or one byte less.
    size = -((10_000 - work) // 10) - fails
    pickled = b"\x80\x02(" + b"N" * 999 + b"tq\1" + hashing
    pickled += text("x" * (size - len(pickled) - 6)) + b"."
    assert len(pickled) == size

    assert ("take too long to hash" in pickle_problem(pickled, {})) == fails


COSTS = {
    "lists": (b"]", 80),
    "dicts": (b"}", 80),
    "dicts of one entry": (b"}NNs", 80 + 168),
    "sets": (b"\x8f", 256),
    "tuples": (b"N\x85", 112),
    "lists of one": (b"]Na", 80 + 32),
    "ordered dicts": (named("collections", "OrderedDict") + b")R", 32 + 128),
    "tensors": (tensor(b"N", b"N", b"N", b"N", b"N", ORDERED), 112 + 2 * 32 + 128 + 320),
}


@for_each("case", COSTS)
@for_each("script", [False, True])
def test_the_memory_of_containers(case, script, monkeypatch):
    """Exactly as many containers as the limit are accepted; a quick count is never below the exact one."""
    one, memory = COSTS[case]
    pickled = b"\x80\x02(" + one * 50 + b"0."
    free = 50 * memory - pickle_limits._MEMORY_PER_BYTE * len(pickled)
    monkeypatch.setattr(pickle_limits, "_FREE_MEMORY", free)
    assert pickle_problem(pickled, {}, reader="torch") == ""
    assert memory_bound(pickled) >= 50 * memory == most_memory(len(pickled), 0)

    monkeypatch.setattr(pickle_limits, "_FREE_MEMORY", free - 1)
    assert "makes more objects than its size explains" in pickle_problem(pickled, {})
    monkeypatch.setattr(pickle_limits, "_FREE_MEMORY", free - 2048)
    members = {"data/0": None}
    assert pickle_problem(pickled, members) == ""


def real_checkpoints():
    """Yield contents with very many small objects, as training writes them."""
    yield "floats", {"losses": [float(i) for i in range(1_000_000)]}
    yield "small numbers", {"labels": [i % 7 for i in range(1_000_000)]}
    yield "truths", {"mask": [True, False] * 500_000}
    yield "texts", {"words": [f"word {i % 50}" for i in range(300_000)]}
    yield "pairs", {"pairs": [[i % 200, 1] for i in range(300_000)]}
    yield "tuples", {"pairs": [(i % 200, 1) for i in range(300_000)]}
    yield "records", {"log": [{"step": i, "loss": i / 7} for i in range(100_000)]}
    yield "merges", {("a" * (i % 9), str(i)): i for i in range(100_000)}
    yield "numbers of NumPy", {"losses": [np.float64(i) for i in range(50_000)]}
    yield "a set", {"losses": [float(i) for i in range(300_000)], "seen": set(range(100_000))}
    yield "optimizer", {"state": {i: {"step": i, "m": torch.ones(1)} for i in range(3000)}}
    whole = torch.arange(10_000.0)
    yield "views", {str(i): whole[i : i + 1] for i in range(10_000)}


@pytest.mark.slow
@for_each(("name", "content"), real_checkpoints, ids=lambda case: case[0])
def test_contents_of_many_small_objects(name, content, tmp_path):
    """They are saved, and read as torch reads them."""
    path = tmp_path / "last.pt"
    modkit.save_checkpoint(content, path)

    assert str(modkit.load_checkpoint(path))[-500:] == str(content)[-500:]


CONTAINERS = {
    "lists": list,
    "lists of one": lambda: [None],
    "dicts": dict,
    "dicts of one": lambda: {True: None},
    "tuples of one": lambda: (None,),
    "tuples of two": lambda: (0, 1),
    "sets": set,
    "ordered dicts": OrderedDict,
    "counters": Counter,
}


@for_each("kind", CONTAINERS)
def test_containers_without_anything_to_spare(kind, tmp_path, monkeypatch):
    """Any number of the smallest containers can be read, because writers memoize each of them."""
    # The first 256 places of the memo take fewer bytes.
    monkeypatch.setattr(pickle_limits, "_FREE_MEMORY", 64 << 10)
    monkeypatch.setattr(pickle_limits, "_MEMORY_PER_MEMBER", 0)
    content = {"many": [CONTAINERS[kind]() for _ in range(10_000)]}
    path = tmp_path / "last.pt"
    modkit.save_checkpoint(content, path)

    assert modkit.load_checkpoint(path) == content


def test_a_quick_count_leaves_the_pickle_to_torch(tmp_path, monkeypatch):
    """Brackets in a text are counted as lists: the file is then followed, and read by torch."""
    path = tmp_path / "last.pt"
    path.write_bytes(saved({"text": "]" * 1000, "weight": torch.ones(2)}))
    assert plain_content(Archive(path.read_bytes(), "x"))
    monkeypatch.setattr(pickle_limits, "_FREE_MEMORY", 1 << 10)

    assert not plain_content(Archive(path.read_bytes(), "x"))
    assert modkit.load_checkpoint(path)["text"] == "]" * 1000


def test_runs_of_the_memo_are_followed():
    """A list of one object many times is as deep as the object, and hashing it takes as long."""
    deep = b"\x80\x02" + b"]" * DEEPEST + b"a" * (DEEPEST - 1) + b"q\1"
    for count in (1, 5):
        assert "nests deeper" not in pickle_problem(deep + b"0](" + b"h\1" * count + b"e.", {})
        inner = deep + b"0](](" + b"h\1" * count + b"ee."
        assert "nests deeper" in pickle_problem(inner, {})
    wide = b"\x80\x02(" + b"N" * 5000 + b"tq\1"
    hashed = called(named("__builtin__", "set"), b"](" + b"h\1" * 20_000 + b"e")
    assert "take too long to hash" in pickle_problem(wide + hashed + b".", {})
    assert "do not fit together" in pickle_problem(b"\x80\x02](h\7h\7e.", {})
    assert "do not fit together" in pickle_problem(b"\x80\x02NNe.", {})
    assert pickle_problem(b"\x80\x02](" + text("x") + b"q\1" + b"h\1j\1\0\0\0NNe.", {}) == ""


@for_each(
    ("who", "case"),
    [
        ("modkit", "dicts of one entry"),
        ("inspect", "marks"),
        ("inspect", "index.json, empty objects"),
        ("modkit", "index.json, names"),
        ("inspect", "safetensors, metadata"),
    ],
)
def test_amplification(who, case, tmp_path):
    """2 MB are refused after a few seconds and 60 times their memory, in a process of its own."""
    found = cost(who, case, 2_000_000, tmp_path)

    assert found.outcome.startswith("FileError")
    assert found.memory < 60 * 2_000_000
    assert found.seconds < 8
