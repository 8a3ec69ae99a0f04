import json
import struct
from collections import Counter, OrderedDict

import torch

import modkit
from modkit.files import pickle_limits
from modkit.files.inert import read_pickle, read_script_pickle
from modkit.files.pickle_limits import memory_bound, most_memory
from modkit.files.plain_pickles import is_plain_pickle
from modkit.files.zip_archive import Archive
from tests.cases import for_each
from tests.processes import python
from tests.unit.files.hostile import (
    ORDERED,
    called,
    checkpoint,
    named,
    numbers,
    tensor,
    text,
    tuple_of,
)
from tests.unit.files.raw_zip import replaced, saved


DEEPEST = pickle_limits.DEEPEST


# By name: a function of the depth that returns a pickle of containers in one another.
NESTED = {
    "lists": lambda n: b"]" * (n + 1) + b"a" * n,
    "marked lists": lambda n: b"](" * (n + 1) + b"e" * (n + 1),
    "tuples": lambda n: b")" + b"\x85" * n,
    "marked tuples": lambda n: b"(" * (n + 1) + b"t" * (n + 1),
    "dicts": lambda n: b"}N" * n + b"N" + b"s" * n,
    "with memo": lambda n: b")" + b"\x85q\0h\0" * n,
}


def problem(pickled, members=0, script=False):
    """Return why a pickle is not read, or an empty text."""
    try:
        if script:
            read_script_pickle(pickled)
            return ""
        return read_pickle(pickled, "file.pt", members).problem(())
    except Exception as error:
        return str(error)


@for_each("kind", NESTED)
@for_each("script", [False, True])
def test_the_deepest_pickle(kind, script):
    """1,000 levels are accepted, one more is refused."""
    pickles = [b"\x80\x02" + NESTED[kind](depth) + b"." for depth in (DEEPEST, DEEPEST + 1)]

    assert problem(pickles[0], script=script) == ""
    assert problem(pickles[1], script=script) == "it nests deeper than 1,000 levels"


@for_each(
    "pickled",
    [b"t" * 2000, b"\x85", b"h\x07a" * 2000, b"I1\n", b")\x85N0" * 20, b"N2", b"\xff", b"(" * 5],
)
@for_each("script", [False, True])
def test_instructions_that_do_not_fit(pickled, script):
    """They are refused, in a TorchScript archive too, whose reader in C++ would crash."""
    assert problem(b"\x80\x02" + pickled + b".", script=script) != ""


def test_a_list_that_is_filled_later():
    """Levels are counted at the end: here from outside inwards, each list by its place in the memo."""
    inner = b"".join(b"]r%sj%sj%sa" % (word(n), word(n - 1), word(n)) for n in range(1, 3000))
    pickled = b"\x80\x02]r\0\0\0\0" + inner + b"j\0\0\0\0."

    assert problem(pickled, script=True) == "it nests deeper than 1,000 levels"


def word(number):
    """Return a place of the memo."""
    return struct.pack("<I", number)


def test_the_last_place_of_the_memo():
    """A place may be as large as the pickle is long: torch's reader in C++ allocates all below it."""
    size = len(b"\x80\x02Nr\0\0\0\0.")
    for place, reason in ((size, ""), (size + 1, f"it stores an object at place {size + 1}")):
        assert problem(b"\x80\x02Nr" + word(place) + b".", script=True) == reason


# By name: a state that is set on an object that all files share, or set twice, and odd tensors.
STATES = {
    "function": named("torch._utils", "_rebuild_tensor_v2") + b"}" + text("x") + b"NsN\x86b",
    "slots of a function": named("torch._utils", "_rebuild_tensor_v2")
    + b"N}"
    + text("__defaults__")
    + b")s\x86b",
    "class": named("collections", "Counter") + b"}" + text("x") + b"Nsb",
    "dtype": named("torch", "float32") + b"N}" + text("x") + b"Ns\x86b",
    "attribute of a function": named("torch._utils", "_rebuild_tensor_v2")
    + b"}"
    + text("x")
    + b"Nsb",
    "attribute of a dtype": named("torch", "float32") + b"}" + text("x") + b"Nsb",
    "a real tensor that is conjugated": tensor(
        None, numbers(0), b")", b")", b"\x89", ORDERED, b"}" + text("conj") + b"\x88s"
    ),
    "twice": named("a", "b") + b")\x81}b" + b"}b",
}


@for_each("case", STATES)
def test_states_of_what_files_share(case):
    """They are refused: another file would see the change, or a reader fail later."""
    assert "its pickle is invalid" in problem(b"\x80\x02" + STATES[case] + b".")


# By name: opcodes with a tuple of 1,000 objects at place 1, and how many objects are hashed.
WORK = {
    "SETITEM": (b"}" + b"h\1Ns" * 50, 50 * 999),
    "SETITEMS": (b"}(" + b"h\1N" * 50 + b"u", 50 * 999),
    # The list, and each pair with what is in it.
    "pairs": (
        called(named("collections", "OrderedDict"), b"](" + b"h\1N\x86" * 25 + b"e"),
        25 + 25 * 2 + 25 * 999,
    ),
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

    assert ("take too long to hash" in problem(pickled)) == fails


FEW = {
    "copies of a tuple": lambda n: named("a", "b") + b"q\2" + b"h\2h\1R" * n,
    "new objects of a tuple": lambda n: named("a", "b") + b"q\2" + b"h\2h\1\x81" * n,
    "sets of a list": lambda n: named("builtins", "set") + b"q\2h\1]h\1a\x85q\3" + b"h\2h\3R" * n,
    "encodings": lambda n: (
        named("_codecs", "encode")
        + b"q\2"
        + text("x" * 9999)
        + text("latin1")
        + b"\x86q\3"
        + b"h\2h\3R" * n
    ),
    "states": lambda n: (
        b"}(" + b"".join(text(str(i)) + b"N" for i in range(999)) + b"uq\2" + ORDERED + b"h\2b" * n
    ),
}


@for_each("case", FEW)
def test_a_few_bytes_that_copy_much(case):
    """Copies that a call or a state makes are counted each time."""
    start = b"\x80\x02(" + b"N" * 9999 + b"tq\1"

    assert problem(start + FEW[case](1) + b".") == ""
    many = problem(start + FEW[case](9999) + b".")
    assert "makes more objects than its size explains" in many or "too long to hash" in many


def test_a_subclass_of_a_tensor_calls_only_functions_of_tensors():
    """``_rebuild_from_type_v2`` would call what the file names, with arguments that are not counted."""
    bomb = b")" + b"".join(b"q%ch%c\x86" % (n, n) for n in range(60))
    kind = named("torch", "Tensor")
    by_type = named("torch._tensor", "_rebuild_from_type_v2")
    hashed = tuple_of(b"](" + bomb + b"e")
    made = called(by_type, named("builtins", "set"), kind, hashed, b"}")

    assert "by another function than those of torch" in problem(b"\x80\x02" + made + b".")
    # Placeholders share their arguments, which each could copy.
    start = b"\x80\2](" + b"(" + b"N" * 99 + b"tq\1"
    other = called(by_type, named("torch._utils", "_rebuild_other"), kind, b"h\1", b"}")
    arguments, *tensors = read_pickle(start + other * 2 + b"e.", "file.pt").value
    assert all(tensor.args is arguments for tensor in tensors)


COSTS = {
    "lists": (b"]", 80),
    "dicts": (b"}", 80),
    "dicts of one entry": (b"}NNs", 80 + 168),
    "sets": (b"\x8f", 256),
    "tuples": (b"N\x85", 112),
    "lists of one": (b"]Na", 80 + 32),
    "ordered dicts": (named("collections", "OrderedDict") + b")R", 32 + 128),
    "tensors": (tensor(), 256 + 4 * (64 + 112) + 2 * 32 + 128 + 320 + 5 + 8 * 6),
}
# In a script, a class is one like any other.
CLASSES = {"ordered dicts": 1500 + 50 * (320 - 128), "tensors": 3000 + 50 * (320 - 128)}


@for_each("case", COSTS)
@for_each("script", [False, True])
def test_the_memory_of_containers(case, script, monkeypatch):
    """Exactly as many containers as the limit are accepted; a quick count is never below the exact one."""
    one, memory = COSTS[case]
    # The set keeps it from the fast path.
    pickled = b"\x80\x02\x8f](" + one * 50 + b"e."
    total = 50 * memory + 256 + 80 + 64 + 32
    free = total - pickle_limits._MEMORY_PER_BYTE * len(pickled)
    free += script * CLASSES.get(case, 0)
    monkeypatch.setattr(pickle_limits, "_FREE_MEMORY", free)
    assert problem(pickled, script=script) == ""
    if not script:
        assert memory_bound(pickled) >= total == most_memory(len(pickled), 0)

    monkeypatch.setattr(pickle_limits, "_FREE_MEMORY", free - 1)
    assert "makes more objects than its size explains" in problem(pickled, script=script)
    if not script:
        assert problem(pickled, members=1) == ""
    monkeypatch.setattr(pickle_limits, "_FREE_MEMORY", free - 2048)
    assert script or problem(pickled, members=1) == ""


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


def test_a_quick_count_leaves_the_pickle_to_the_exact_one(tmp_path, monkeypatch):
    """Brackets in a text are counted as lists: the file is then read with limits."""
    path = tmp_path / "last.pt"
    path.write_bytes(saved({"text": "]" * 1000, "weight": torch.ones(2)}))
    monkeypatch.setattr(pickle_limits, "_FREE_MEMORY", 1 << 11)

    assert not is_plain_pickle(Archive(path.read_bytes(), "x").text("data.pkl"), 0)
    assert modkit.load_checkpoint(path)["text"] == "]" * 1000


# A set keeps a file from the fast path.
BOMBS = {
    "dicts of one entry": (b"](", b"}NNs", b"e"),
    "marks": (b"", b"(", b""),
    "sets": (b"](", b"\x8f", b"e"),
}
COST = """
import json, sys, time, modkit
from modkit import files

def status(name):
    line = next(x for x in open("/proc/self/status") if x.startswith(name))
    return int(line.split()[1]) << 10

load = {"modkit": modkit.load_checkpoint, "inspect": files.inspect}[sys.argv[1]]
load(sys.argv[3])
open("/proc/self/clear_refs", "w").write("5")
before, start = status("VmRSS"), time.process_time()
try:
    load(sys.argv[2])
except modkit.errors.FileError:
    print(json.dumps([time.process_time() - start, status("VmHWM") - before]))
"""


@for_each(
    ("who", "case"), [("modkit", "dicts of one entry"), ("inspect", "marks"), ("modkit", "sets")]
)
def test_amplification(who, case, tmp_path):
    """2 MB are refused after a few seconds and 60 times their memory, in a process of its own."""
    opening, repeated, closing = BOMBS[case]
    pickled = b"\x80\x02" + opening + repeated * (2_000_000 // len(repeated)) + closing + b"."
    (tmp_path / "small.pt").write_bytes(checkpoint())
    (tmp_path / "large.pt").write_bytes(replaced(checkpoint(), {"data.pkl": pickled}))
    run = python(COST, who, tmp_path / "large.pt", tmp_path / "small.pt")
    seconds, memory = json.loads(run.stdout)

    assert memory < 60 * 2_000_000
    assert seconds < 8
