import collections
import io
import pickle
import pickletools

import pytest

from modkit.errors import FileError
from modkit.jit import _archive_pickle as machine
from modkit.jit._archive import inspect
from modkit.jit._archive_pickle import Call, Name, Reference, read_pickle


def read(data):
    """Return what a pickle holds."""
    return read_pickle(io.BytesIO(data), "the pickle")[0]


PLAIN = [
    None,
    True,
    [1, -1, 255, 65536, 2**40, -(2**80)],
    {"a": (1, 2.5, "text"), "b": {"c": [(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)]}},
    "ä" * 300,
    [{1: {2: [3]}}, {"x": None}],
]


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("value", PLAIN, ids=range(len(PLAIN)))
def test_plain_values(value, protocol):
    """Numbers, text and containers come back as Python's own unpickler gives them back."""
    assert read(pickle.dumps(value, protocol)) == value


@pytest.mark.parametrize("value", [{1, 2}, frozenset("ab"), b"bytes", bytearray(b"array")])
def test_values_of_later_protocols(value):
    """Sets and bytes come back in the protocol that has instructions for them."""
    assert read(pickle.dumps(value, 5)) == value


def test_shared_and_endless_values():
    """One object in two places stays one, and a list may hold itself."""
    shared = [1]
    endless = [shared, shared]
    endless.append(endless)

    found = read(pickle.dumps(endless))
    assert found[0] is found[1]
    assert found[2] is found


def test_calls_are_noted_and_not_made():
    """Where Python would import a name and call it, the name, arguments and state are noted."""

    class Holder:
        def __reduce__(self):
            return collections.Counter, ("aab",), {"state": 1}

    found, names = read_pickle(io.BytesIO(pickle.dumps(Holder())), "the pickle")

    assert isinstance(found, Call)
    assert (str(found.function), found.arguments) == ("collections.Counter", ("aab",))
    assert found.state == {"state": 1}
    assert names == (Name("collections", "Counter"),)


def test_entries_of_an_ordered_dict():
    """What is set in an object that is called for counts as its members."""
    ordered = collections.OrderedDict(a=1, b=2)

    for protocol in (2, 4):
        found = read(pickle.dumps(ordered, protocol))
        assert dict(machine.entries_of(found)) == ordered


def test_references_to_the_file_around():
    """What the pickle leaves to the file around it is a reference with its key."""

    class Pickler(pickle.Pickler):
        def persistent_id(self, value):
            return ("storage", 7) if value == "key" else None

    file = io.BytesIO()
    Pickler(file, 2).dump(["key"])

    found = read(file.getvalue())[0]
    assert isinstance(found, Reference)
    assert found.key == ("storage", 7)


def test_pickles_one_after_another():
    """The file stands behind the pickle afterwards, so that the next one can be read."""
    file = io.BytesIO(pickle.dumps(1) + pickle.dumps("two"))

    assert [read_pickle(file, "it")[0] for _ in range(2)] == [1, "two"]


DAMAGED = {
    "nothing": b"",
    "no end": b"\x80\x02]",
    "empty stack": b"\x80\x02.",
    "no mark": b"\x80\x02K\x01t.",
    "mark at the end": b"\x80\x02(.",
    "mark as value": b"\x80\x02(\x85.",
    "unknown memo": b"\x80\x02h\x09.",
    "unknown instruction": b"\x80\x02\xff.",
    "short text": b"\x80\x02X\xff\x00\x00\x00abc.",
    "no text": b"\x80\x02X\x02\x00\x00\x00\xff\xfe.",
    "odd items": b"\x80\x02}(K\x01u.",
    "key that has no hash": b"\x80\x02}(]K\x01u.",
    "items of a number": b"\x80\x02K\x01(K\x01e.",
    "state of a number": b"\x80\x02K\x01K\x02b.",
    "name of a number": b"\x80\x04K\x01K\x02\x93.",
    "extension": b"\x80\x02\x82\x01.",
    "object of protocol 0": b"(ios\nsystem\n.",
    "too long": b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\x7fabc.",
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_pickles(case):
    """What is no whole pickle is an error that names the file, whatever is wrong with it."""
    with pytest.raises(FileError, match="the pickle is damaged"):
        read(DAMAGED[case])


@pytest.mark.parametrize("seed", range(4))
def test_a_flipped_byte_never_runs_anything(seed):
    """Every change of one byte gives a value or the one error, and nothing is imported."""
    data = pickle.dumps({"a": [1, (2.0, "x")], "b": collections.OrderedDict(c=range(3))}, seed + 1)

    outcomes = set()
    for place in range(len(data)):
        for mask in (1, 0x20, 0x80, 0xFF):
            changed = bytearray(data)
            changed[place] ^= mask
            try:
                read(bytes(changed))
            except FileError as error:
                outcomes.add(type(error))
            else:
                outcomes.add(None)
    assert outcomes == {None, FileError}


def test_a_memo_of_billions_takes_no_room():
    """A number of the memo is a key, not a length: C's unpickler would take gigabytes for it."""
    assert read(b"\x80\x02K\x01r\xff\xff\xff\x7f.") == 1


def test_the_number_of_instructions_is_limited(monkeypatch):
    """A pickle with more instructions than any file of torch has is refused."""
    monkeypatch.setattr(machine, "MOST_INSTRUCTIONS", 100)

    with pytest.raises(FileError, match="more than 100 instructions"):
        read(b"\x80\x02" + b"N0" * 60 + b"N.")


def test_nested_keys_are_refused():
    """A key of shared tuples, whose hash would take for ever, is refused at once."""
    doubled = b"\x80\x02}(K\x01" + b"2\x86" * 60 + b"K\x01u."

    assert "TUPLE2" in {code.name for code, _, _ in pickletools.genops(doubled)}
    with pytest.raises(FileError, match="a key is nested"):
        read(doubled)


def test_a_tree_that_doubles_at_each_level_is_walked_once():
    """Lists that hold one list twice, sixty levels deep, are looked at once each."""
    value = [1]
    for _ in range(60):
        value = [value, value]

    assert inspect(pickle.dumps({"deep": value})).tensors == ()


def test_deep_nesting():
    """Nesting deeper than Python's stack is walked all the same."""
    data = b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b"."

    assert inspect(data).tensors == ()
