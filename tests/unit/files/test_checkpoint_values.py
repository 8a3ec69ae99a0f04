import argparse
import collections
import datetime as dt
import enum
import fractions
import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import modkit
from modkit.errors import FileError
from modkit.files.checkpoints import write_checkpoint
from tests.capabilities import READERS_FILL_DICTS
from tests.cases import for_each
from tests.helpers import freeze
from tests.unit.files.hostile import called, named, numbers, text, tuple_of
from tests.unit.files.raw_zip import replaced, saved


class Color(enum.Enum):
    """An enumeration."""

    RED = 1


class Options:
    """A class of the user."""


class Labels(torch.Tensor):
    """A class of tensors of the user."""


def loaded_by(loader: object) -> torch.nn.Parameter:
    """Return a parameter that says how it is loaded, as in vLLM."""
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.loader = loader
    return parameter


Point = collections.namedtuple("Point", "x")

READABLE: dict[str, Any] = {
    "mean": np.mean([1.0, 2.0]),
    **{f"scalar {code}": np.dtype(code).type(1) for code in ("b1", "i1", "u8", "f2", "f4", "c8")},
    "random state": np.random.RandomState(0).get_state(),
    **{
        kind: np.random.Generator(getattr(np.random, kind)(0)).bit_generator.state
        for kind in ("PCG64", "MT19937", "Philox", "SFC64")
    },
    "array": np.arange(6.0).reshape(2, 3).T,
    "array without dimensions": np.array(3),
    "empty array": np.array([], dtype=np.int32),
    "dtype": np.dtype("f4"),
    "namespace": argparse.Namespace(lr=0.1, scale=np.float32(2)),
    "plain": [1, 2.5, True, None, "text", b"bytes", b"", 1j, 2**200, {1, 2}, (1, [2])],
    "counter": collections.Counter("aab"),
    "torch": [torch.float32, torch.Size([1]), torch.device("cpu"), torch.strided],
    "sparse": torch.eye(2).to_sparse(),
    "parameter": torch.nn.Parameter(torch.ones(2)),
}


def plain(value: Any) -> Any:
    """Return a value for a comparison: NumPy's with their types, dtypes and contents."""
    if isinstance(value, np.generic | np.ndarray):
        return type(value), value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value), [plain(one) for one in value]
    return freeze(value) if isinstance(value, torch.Tensor) else value


@for_each("mmap", [False, True])
@for_each("location", [None, "cpu", lambda storage, _: storage], ids=["none", "cpu", "function"])
@for_each("name", READABLE)
def test_what_can_be_saved_is_read(name: str, location: Any, mmap: bool, tmp_path: Path) -> None:
    """Every way of reading returns the value that was saved, of the same type."""
    value = READABLE[name]
    modkit.save_checkpoint({"weight": torch.ones(3), "run": [value]}, tmp_path / "last.pt")
    before = set(torch.serialization.get_safe_globals())
    found = modkit.load_checkpoint(tmp_path / "last.pt", location, mmap=mmap)["run"][0]

    if name == "namespace":
        value, found = vars(value), vars(found)
    assert plain(found) == plain(value)
    assert set(torch.serialization.get_safe_globals()) == before


class Dict(dict[str, int]):
    """A subclass of a dict, whose entries torch does not set."""


class List(list[int]):
    """A subclass of a list, to which torch does not append."""


class Ordered(collections.OrderedDict[str, int]):
    """A subclass of an ordered dict."""


class Count(collections.Counter[str]):
    """A counter, which is made from a dict."""


PLAIN = "save dicts, lists, tuples, sets, strings, bytes, numbers and tensors, or allow it with"
TENSOR = "save a plain tensor, such as its as_subclass(torch.Tensor), or allow it with"
REFUSED: dict[str, tuple[Any, str, str]] = {
    "path": (Path("run"), "pathlib.", "save str(path)"),
    "time": (
        dt.datetime(2026, 1, 1, tzinfo=dt.timezone.utc),
        "datetime.datetime",
        "save its isoformat()",
    ),
    "module": (torch.nn.Linear(1, 1), "torch.nn.modules.linear.Linear", "save its state_dict()"),
    "optimizer": (
        torch.optim.SGD([torch.ones(1)], lr=0.1),
        "torch.optim.sgd.SGD",
        "save its state_dict()",
    ),
    "enumeration": (Color.RED, f"{__name__}.Color", PLAIN),
    "object": (Options(), f"{__name__}.Options", PLAIN),
    "class": (Options, f"{__name__}.Options", PLAIN),
    "named tuple": (Point(1), f"{__name__}.Point", PLAIN),
    "function": (lambda: None, f"{__name__}.<lambda>", PLAIN),
    "torch function": (torch.nn.functional.relu, "torch.nn.functional.relu", PLAIN),
    "fraction": (fractions.Fraction(1, 2), "fractions.Fraction", PLAIN),
    "frozen set": (frozenset([1]), "builtins.frozenset", PLAIN),
    "default dict": (
        collections.defaultdict(list),
        "collections.defaultdict",
        PLAIN,
    ),
    "memory format": (torch.channels_last, "torch.memory_format", PLAIN),
    "ellipsis": (..., "builtins.ellipsis", PLAIN),
    "file": (io.StringIO(), "_io.StringIO", PLAIN),
    "generator": (torch.Generator(), "torch._C.Generator", "save its get_state()"),
    "random": (np.random.default_rng(), "numpy.random", "save its bit_generator.state"),
    "strings": (np.array(["a"]), "numpy.ndarray", "save its tolist()"),
    "objects": (np.array([None]), "numpy.ndarray", "save its tolist()"),
    "date": (np.datetime64("2026"), "numpy.datetime64", "save its tolist()"),
    "tensor": (torch.ones(2).as_subclass(Labels), f"{__name__}.Labels", TENSOR),
    "parameter": (
        torch.nn.Parameter(torch.ones(2).as_subclass(Labels)),
        f"{__name__}.Labels",
        TENSOR,
    ),
}


@for_each("name", REFUSED)
def test_what_cannot_be_read_is_not_saved(name: str, tmp_path: Path) -> None:
    """The error names the entry and what to save instead; the previous file stays."""
    value, kind, advice = REFUSED[name]
    path = tmp_path / "last.pt"
    modkit.save_checkpoint({"epoch": 1}, path)
    content = {"weight": torch.ones(3), "run": {"best": [0.5, value]}}

    with pytest.raises(TypeError) as caught:
        modkit.save_checkpoint(content, path)
    message = str(caught.value)
    assert message.startswith("save_checkpoint: checkpoint['run']['best'][1] is ")
    assert kind in message
    assert f"which load_checkpoint does not read; {advice}" in message
    assert modkit.load_checkpoint(path) == {"epoch": 1}
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("content", "place"),
    [
        ({"run": {Path("a"): 1}}, "checkpoint['run'].keys() is of type pathlib."),
        ({"run": {1, Path("a")}}, "checkpoint['run'] is of type pathlib."),
        ({"args": argparse.Namespace(out=Path("a"))}, "checkpoint['args'].out is of type pathlib."),
        ({"weight": loaded_by(Path("a"))}, "checkpoint['weight'].loader is of type pathlib."),
        ([Path("a")], "checkpoint[0] is of type pathlib."),
        (Path("a"), "checkpoint is of type pathlib."),
    ],
    ids=["key", "set", "namespace", "parameter", "list", "whole"],
)
def test_the_place_of_what_cannot_be_read(content: Any, place: str, tmp_path: Path) -> None:
    """The error leads to the innermost object."""
    with pytest.raises(TypeError) as caught:
        modkit.save_checkpoint(content, tmp_path / "last.pt")

    assert place in str(caught.value)


def test_the_place_in_a_list_that_contains_itself(tmp_path: Path) -> None:
    """The search ends."""
    content: list[Any] = []
    content += [content, Path("a")]

    with pytest.raises(TypeError, match=r"checkpoint\[1\] is of type pathlib"):
        modkit.save_checkpoint(content, tmp_path / "last.pt")


def holding_itself(kind: str) -> Any:
    """Return an object whose content refers to the object."""
    if kind == "tensor":
        tensor: Any = torch.ones(1)
        tensor.itself = tensor
        return tensor
    inner: list[Any] = []
    inner.append((1, inner) if kind == "list" else ("a", inner, 3, 4))
    return inner if kind == "list" else inner[0]


# Pickles that torch.save writes, and that no torch.load(weights_only=True) reads.
BEYOND_READERS: dict[str, Any] = {
    "integer": 1 << 2039,
    "negative integer": -(1 << 2039) - 1,
    "tuple": holding_itself("tuple"),
    "tensor": holding_itself("tensor"),
    "default dict": collections.defaultdict(list, a=1),
    "dict": Dict(a=1),
    "list": List([1]),
    "ordered dict": Ordered(a=1),
    "deque": collections.deque([1]),
}
READ_BY_OLDER_RELEASES = {"default dict", "dict", "ordered dict"}
WITHIN_READERS: dict[str, Any] = {
    "integers": [(1 << 2039) - 1, -(1 << 2039)],
    "list in a tuple in it": holding_itself("list"),
    "twice": [(both := (1, [2])), both],
    "empty dict": Dict(),
    "counter": Count("aab"),
}
ALLOWED = [collections.defaultdict, collections.deque, list, dict, Dict, List, Ordered, Count]


@for_each("name", {**BEYOND_READERS, **WITHIN_READERS})
def test_what_torch_cannot_read_is_not_saved(name: str, tmp_path: Path) -> None:
    """Whatever is saved can be read, also of classes that the user allows, and by later releases."""
    content = {"run": [{**BEYOND_READERS, **WITHIN_READERS}[name]]}
    path = tmp_path / "last.pt"
    with torch.serialization.safe_globals(ALLOWED):
        torch.save(content, tmp_path / "torch.pt")
        try:
            torch.load(tmp_path / "torch.pt", weights_only=True)
            readable = True
        except pickle.UnpicklingError:
            readable = False
        older_reads = name in READ_BY_OLDER_RELEASES and READERS_FILL_DICTS
        assert readable == (name in WITHIN_READERS or older_reads)

        if name in WITHIN_READERS:
            modkit.save_checkpoint(content, path)
            assert type(modkit.load_checkpoint(path)["run"][0]) is type(content["run"][0])
        else:
            with pytest.raises(TypeError, match=r"checkpoint\['run'\]\[0\] is (of|an) "):
                modkit.save_checkpoint(content, path)
            assert not path.exists()


def test_what_the_user_allows_is_saved_and_read(tmp_path: Path) -> None:
    """The error of loading names the function that allows a class, where the user trusts the file."""
    path = tmp_path / "last.pt"
    with torch.serialization.safe_globals([Options]):
        modkit.save_checkpoint({"options": Options()}, path)
        found = modkit.load_checkpoint(path)["options"]
    advice = rf"inside torch\.serialization\.safe_globals\(\[{__name__}\.Options\]\)"

    assert type(found) is Options
    with pytest.raises(FileError, match=advice):
        modkit.load_checkpoint(path)


def test_an_allowed_object_that_does_not_name_its_module(tmp_path: Path) -> None:
    """The module is the one in which pickle finds the object: an ellipsis has no ``__module__``."""
    path = tmp_path / "last.pt"
    with torch.serialization.safe_globals([(..., "builtins.Ellipsis")]):
        modkit.save_checkpoint({"index": [0, ...]}, path)

        assert modkit.load_checkpoint(path) == {"index": [0, ...]}


def test_a_checkpoint_that_is_too_large_without_its_tensors(monkeypatch) -> None:
    """Readers refuse a pickle above their limit, so it is not written."""
    monkeypatch.setattr("modkit.files.checkpoints.MOST_TEXT", 1000)
    content = {"losses": list(range(1000))}

    with pytest.raises(
        ValueError, match=r"without its tensors it has .* save long lists as tensors"
    ):
        modkit.save_checkpoint(content, io.BytesIO())


def dtype_of(code: str, state: bytes = b"", copy: bytes = b"\x88") -> bytes:
    """Return the pickle of a dtype of NumPy."""
    return called(named("numpy", "dtype"), text(code), b"\x89", copy) + state


STATE = b"(K\x03" + text("<") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
FLAGS = STATE.replace(b"K\x00tb", b"K\x3ftb")
FIELDS = STATE.replace(b"NNN", b"N" + tuple_of(text("a")) + b"}")
BIG = STATE.replace(text("<"), text(">"))
ARRAY = called(
    named("numpy._core.multiarray", "_reconstruct"),
    named("numpy", "ndarray"),
    tuple_of(b"K\x00"),
    text("b"),
)
HOSTILE: dict[str, bytes] = {
    "flags of a dtype": dtype_of("f8", FLAGS),
    "fields of a dtype": dtype_of("f8", FIELDS),
    "dtype of objects": dtype_of("O8"),
    "dtype of bytes": dtype_of("V8", STATE),
    "structured dtype": dtype_of("f8,f8"),
    "the dtype of the process": dtype_of("f8", BIG, copy=b"\x89"),
    "array made by its class": called(named("numpy", "ndarray"), tuple_of(numbers(1)), text("O")),
    "array of another shape": ARRAY.replace(tuple_of(b"K\x00"), tuple_of(b"J\x00\x00\x00\x40")),
    "array of another class": ARRAY.replace(named("numpy", "ndarray"), named("torch", "Tensor")),
    "state of an array": ARRAY + b"(K\x01K\x02\x85" + text("O") + b"\x89" + text("ab") + b"tb",
    "scalar of a string": called(named("numpy._core.multiarray", "scalar"), text("O"), b"K\x01"),
    "bytes of a number": called(named("__builtin__", "bytes"), b"J\xff\xff\xff\x7f"),
    "name in another split": called(named("numpy", "_core.multiarray.scalar"), text("O"), b"K\x01"),
}


@for_each("name", HOSTILE)
def test_objects_of_numpy_that_are_not_numbers(name: str, tmp_path: Path) -> None:
    """Flags of a dtype make NumPy take numbers for addresses, so only numbers are read."""
    path = tmp_path / "last.pt"
    content = b"\x80\x02}" + text("value") + HOSTILE[name] + b"s."
    path.write_bytes(replaced(saved({"w": torch.ones(2)}), {"data.pkl": content}))

    for location in (None, lambda storage, _: storage):
        with pytest.raises(
            FileError,
            match=r"objects of NumPy|dtype of NumPy|array of NumPy|makes bytes in another way",
        ):
            modkit.load_checkpoint(path, location)
    assert np.dtype("f8").isnative


def test_numpy_that_the_user_allows_has_no_limits(tmp_path: Path) -> None:
    """A user who trusts a file may read any array."""
    path, array = tmp_path / "last.pt", np.array(["a", "b"])
    write_checkpoint({"names": array}, path)
    reconstruct, scalar = array.__reduce__()[0], np.float64(0).__reduce__()[0]
    allowed = [reconstruct, scalar, np.ndarray, np.dtype, type(array.dtype)]

    with torch.serialization.safe_globals(allowed):
        assert modkit.load_checkpoint(path)["names"].tolist() == ["a", "b"]
    reason = "it has strings, dates, records or objects of NumPy"
    with pytest.raises(FileError, match=f"data.pkl: {reason}"):
        modkit.load_checkpoint(path)
