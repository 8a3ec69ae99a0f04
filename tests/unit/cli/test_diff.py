"""The command ``diff``: names, shapes, dtypes and values of two checkpoints."""

import functools
import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from modkit.cli.tensor_differences import Difference, largest_difference
from tests.processes import peak_of_command
from tests.unit.cli.command_line import invoke


run = functools.partial(invoke, "diff")
State = dict[str, Tensor]


def report(*arguments: object) -> dict[str, Any]:
    """Run the command with ``--json``, and return the document with the exit status in it."""
    done = run(*arguments, "--json")
    assert done.stderr == ""
    found: dict[str, Any] = json.loads(done.stdout, parse_constant=pytest.fail)
    assert done.exit_code == (0 if found["equal"] else 1)
    return found


def write(folder: Path, a: State, b: State) -> tuple[Path, Path]:
    """Write two files of torch."""
    torch.save(a, folder / "a.pt")
    torch.save(b, folder / "b.pt")
    return folder / "a.pt", folder / "b.pt"


def net() -> State:
    """Return the state of a network with tensors of several dtypes."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 4)).state_dict()


@pytest.mark.parametrize("values", [[], ["--values"]])
def test_equal_checkpoints(tmp_path: Path, values: list[str]) -> None:
    """The status is 0, and the line says if values were compared; the format does not matter."""
    a, b = write(tmp_path, net(), net())
    save_file(net(), tmp_path / "c.safetensors")
    for other in (b, tmp_path / "c.safetensors"):
        done = run(a, other, *values)
        last = done.stdout.splitlines()[-1]

        assert (done.exit_code, done.stderr) == (0, "")
        assert last.startswith("equal (compared: names, shapes")
        assert ("--values compares values too" in last) == (values == [])


def test_without_values_only_names_shapes_and_dtypes_count(tmp_path: Path) -> None:
    """Other values are equal without ``--values``, and different with it."""
    a, b = write(tmp_path, {"w": torch.zeros(3)}, {"w": torch.ones(3)})
    unread, compared = report(a, b), report(a, b, "--values")

    assert (unread["equal"], unread["values"]) == (True, None)
    assert not compared["equal"]
    assert compared["values"] == [
        {"a": "w", "b": "w", "absolute": 1.0, "relative": 1.0, "nonfinite": 0, "equal": False}
    ]


def test_each_kind_of_difference(tmp_path: Path) -> None:
    """Names, a rename, a shape and a dtype: in the document, in the tables and in the last line."""
    old, new = net(), net()
    new["0.bias"] = torch.zeros(7)
    new["1.weight"] = new["1.weight"].half()
    new["head.weight"] = new.pop("2.weight")
    new["head.bias"] = new.pop("2.bias")
    new["extra"] = torch.ones(2, 3, 4)
    del new["1.num_batches_tracked"]
    a, b = write(tmp_path, old, new)
    found = report(a, b)
    shown = run(a, b).stdout

    assert found["only_in_a"] == ["1.num_batches_tracked"]
    assert found["only_in_b"] == ["extra"]
    assert found["renamed"] == [
        {"a": "2.bias", "b": "head.bias"},
        {"a": "2.weight", "b": "head.weight"},
    ]
    assert found["rules"] == [
        {"kind": "rename", "a": ["2"], "b": ["head"], "tensors": 2, "certain": True}
    ]
    half = {"shape_a": [5], "shape_b": [5], "dtype_a": "float32", "dtype_b": "float16"}
    larger = {"shape_a": [5], "shape_b": [7], "dtype_a": "float32", "dtype_b": "float32"}
    assert found["changed"] == [
        {"a": "0.bias", "b": "0.bias", **larger},
        {"a": "1.weight", "b": "1.weight", **half},
    ]
    for text in ("[2, 3, 4] float32", "[5] float16", "[7] float32", "1.num_batches_tracked"):
        assert text in shown
    counts = "1 only in A, 1 only in B, 2 renamed, 1 of another shape, 1 of another dtype"
    assert f"different: {counts} (compared: " in shown


def test_the_values_of_renamed_tensors(tmp_path: Path) -> None:
    """They are compared, also where the shape of others differs."""
    old = net()
    new = {f"module.{name}": value.clone() for name, value in old.items()}
    new["module.0.weight"][2, 3] += 0.5
    new["module.2.bias"] = torch.zeros(9)
    found = report(*write(tmp_path, old, new), "--values")

    unequal = [row for row in found["values"] if not row["equal"]]
    assert found["rules"][0]["kind"] == "prefix"
    assert len(found["values"]) == len(old) - 1
    assert [(row["a"], row["b"]) for row in unequal] == [("0.weight", "module.0.weight")]
    assert unequal[0]["absolute"] == pytest.approx(0.5, rel=1e-6)


def test_a_rename_that_shapes_cannot_decide(tmp_path: Path) -> None:
    """Both candidates are shown, nothing is paired, and the tensors count as missing."""
    old = {"net.w": torch.ones(5, 2), "ema.w": torch.ones(5, 2)}
    a, b = write(tmp_path, old, {"w": torch.ones(5, 2)})
    found, shown = report(a, b), run(a, b).stdout

    (rule,) = found["rules"]
    assert (rule["certain"], found["renamed"]) == (False, [])
    assert (sorted(rule["a"]), rule["b"]) == (["ema.", "net."], [""])
    assert (sorted(found["only_in_a"]), found["only_in_b"]) == (["ema.w", "net.w"], ["w"])
    assert "ema. or net." in shown
    assert "no: shapes do not tell" in shown


def test_the_keys(tmp_path: Path) -> None:
    """One ``--key`` is for both files, two are for A and B; an empty one is the whole file."""
    torch.save({"model": net(), "ema": {"averages": net()}}, tmp_path / "a.pt")
    torch.save({"model": net()}, tmp_path / "b.pt")
    torch.save(net(), tmp_path / "c.pt")
    a, b, c = (tmp_path / f"{name}.pt" for name in "abc")

    assert run(a, b, "--key", "model").exit_code == 0
    assert run(a, b, "--key", "ema.averages", "--key", "model").exit_code == 0
    assert run(a, c, "--key", "model", "--key", "").exit_code == 0
    assert run(a, a, *["--key", "model"] * 3).exit_code == 2


@pytest.mark.parametrize("rtol", [None, 1e-4, 1e-2])
def test_the_tolerance(tmp_path: Path, rtol: float | None) -> None:
    """Up to it floating-point values are equal, as of ``math.isclose``; integers have to be equal."""
    old = {"w": torch.tensor([1.0, -2.0, 0.0]), "n": torch.tensor([1000, 7])}
    new = {"w": torch.tensor([1.001, -2.0, 0.0]), "n": torch.tensor([1001, 7])}
    options = [] if rtol is None else ["--rtol", rtol]
    found = report(*write(tmp_path, old, new), "--values", *options)

    pairs = zip(old["w"].tolist(), new["w"].tolist(), strict=True)
    is_close = all(math.isclose(x, y, rel_tol=rtol or 0.0) for x, y in pairs)
    assert {row["a"]: row["equal"] for row in found["values"]} == {"w": is_close, "n": False}


DTYPES = [
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn),
    *(torch.int64, torch.int8, torch.uint8, torch.complex64, torch.complex128),
]


@pytest.mark.parametrize(("a_dtype", "b_dtype"), [*pairwise([*DTYPES, DTYPES[0]])])
def test_differences_are_those_of_python(a_dtype: torch.dtype, b_dtype: torch.dtype) -> None:
    """Any two dtypes are compared, in several pieces, also if tensors are not contiguous."""
    torch.manual_seed(1)
    a = (torch.randn(3, 100_000, 2)[..., 0] * 5).to(a_dtype).t()
    b = torch.where(torch.rand(100_000, 3) < 1e-3, 1.0, a.to(torch.complex128)).real.to(b_dtype)

    pairs = [(x, y) for x, y in zip(*(t.flatten().tolist() for t in (a, b)), strict=True) if x != y]
    absolute = max((abs(x - y) for x, y in pairs), default=0)
    relative = max((abs(x - y) / max(abs(x), abs(y)) for x, y in pairs), default=0)
    found = largest_difference(a, b)
    assert found == pytest.approx((absolute, relative, 0), rel=1e-14)


@pytest.mark.parametrize(
    ("values", "others", "dtype", "absolute"),
    [
        ([2**63 - 1, 5], [-(2**63), 5], torch.int64, 2**64 - 1),
        ([2**53 + 1], [2**53], torch.int64, 1),
        ([-(2**63)], [-(2**63) + 2], torch.int64, 2),
        ([2**64 - 1, 3], [0, 3], torch.uint64, 2**64 - 1),
        ([2**63], [2**63 - 1], torch.uint64, 1),
        ([True, False], [True, True], torch.bool, 1),
        ([255, 0], [0, 0], torch.uint8, 255),
    ],
)
def test_integers_are_exact(
    values: list[int], others: list[int], dtype: torch.dtype, absolute: int
) -> None:
    """They are compared as integers, also where their difference needs all 64 bits."""
    found = largest_difference(torch.tensor(values, dtype=dtype), torch.tensor(others, dtype=dtype))

    assert (found.absolute, type(found.absolute)) == (absolute, int)
    assert found.relative == pytest.approx(
        max(abs(x - y) / max(x, y, -x, -y, 1) for x, y in zip(values, others, strict=True))
    )


def test_integers_that_have_no_common_type() -> None:
    """An int64 and a uint64 are compared as float64."""
    a = torch.tensor([-1, 2**62])
    b = torch.tensor([2**64 - 1, 2**62], dtype=torch.uint64)

    assert largest_difference(a, b) == largest_difference(b, a) == (2.0**64, 1.0, 0)


def test_lazy_conjugates_and_negatives() -> None:
    """Tensors that torch has not written out yet have their values."""
    values = torch.tensor([1 + 2j, 3 - 4j])
    conjugate = values.conj()

    assert largest_difference(conjugate, conjugate.resolve_conj()) == (0, 0, 0)
    assert largest_difference(conjugate, values) == pytest.approx((8, 4 / math.sqrt(5), 0))
    assert largest_difference(conjugate.imag, values.imag) == (8, 2, 0)
    # One element of a column has a step that is not that of bytes.
    column = values[::2]
    assert largest_difference(column, column) == (0, 0, 0)


def test_the_largest_difference_is_first(tmp_path: Path) -> None:
    """Tensors with NaN are before all others, then the relative difference counts."""
    old = {name: torch.ones(2) for name in ("tiny", "huge", "some", "broken")}
    new = {name: torch.ones(2) for name in old}
    for name, value in (("tiny", 1.001), ("huge", 9.0), ("some", 1.5), ("broken", NAN)):
        new[name][1] = value
    shown = run(*write(tmp_path, old, new), "--values").stdout

    places = [shown.index(f" {name} ") for name in ("broken", "huge", "some", "tiny")]
    assert places == sorted(places)


NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ([NAN, 1.0], [NAN, 1.0], (0, 0, 0)),
        ([NAN, 1.0], [0.0, 3.0], (2, 2 / 3, 1)),
        ([INF, -INF, INF], [INF, INF, 5.0], (0, 0, 2)),
        ([0.0], [-0.0], (0, 0, 0)),
        ([0.0, 2.0], [1.0, 2.0], (1, 1, 0)),
        ([-1e308], [1e308], (torch.finfo(torch.float64).max, 2, 0)),
        ([complex(NAN, 1), 3j], [complex(NAN, 1), 4j], (1, 0.25, 0)),
        ([complex(NAN, 1)], [complex(NAN, 2)], (0, 0, 1)),
        ([3 + 4j], [0j], (5, 1, 0)),
        ([], [], (0, 0, 0)),
    ],
)
def test_not_a_number_and_infinity(a: list[Any], b: list[Any], expected: Difference) -> None:
    """They are counted, and have no part in the largest difference; the same on both sides is equal."""
    wide = torch.complex128 if any(isinstance(value, complex) for value in a) else torch.float64
    found = largest_difference(torch.tensor(a, dtype=wide), torch.tensor(b, dtype=wide))

    assert found == pytest.approx(expected)


def test_the_document_is_valid_json(tmp_path: Path) -> None:
    """No constant beside the standard, such as NaN, and names are escaped."""
    name = "w\x1b[31m\n"
    old = {name: torch.tensor([NAN, -1e308, 1.0], dtype=torch.float64)}
    new = {name: torch.tensor([INF, 1e308, 1.0], dtype=torch.float64)}
    a, b = write(tmp_path, old, new)
    (row,) = report(a, b, "--values")["values"]

    assert (row["a"], row["nonfinite"], row["equal"]) == (name, 1, False)
    assert "\x1b" not in run(a, b, "--values", "--json").stdout
    assert "w\\x1b[31m\\n" in run(a, b, "--values").stdout


def test_long_tables_are_cut(tmp_path: Path) -> None:
    """``--limit`` is the number of rows, and the last line has the number of all."""
    a, b = write(tmp_path, {f"{n}": torch.ones(n + 1) for n in range(150)}, {"w": torch.ones(0)})
    shown = run(a, b, "--limit", 7).stdout

    assert "--limit 151 shows all rows" in shown
    assert shown.count("float32") == 7
    assert "150 only in A, 1 only in B" in shown
    assert "shows all rows" not in run(a, b, "--limit", 151).stdout


def test_a_flipped_bit(tmp_path: Path) -> None:
    """It is found with ``--values``, in either of the two files."""
    weight = torch.arange(1000.0)
    torch.save({"w": weight}, tmp_path / "a.pt")
    content = (tmp_path / "a.pt").read_bytes()
    flipped = weight.numpy().tobytes().replace(b"\x80\x3f", b"\x81\x3f", 1)
    (tmp_path / "bit.pt").write_bytes(content.replace(weight.numpy().tobytes(), flipped))

    for names in (("a.pt", "bit.pt"), ("bit.pt", "a.pt")):
        done = run(*(tmp_path / name for name in names), "--values")

        assert (done.exit_code, done.stdout) == (2, "")
        assert "the content of 'a/data/0' does not match its checksum" in done.stderr


def test_a_dtype_whose_values_are_unknown(tmp_path: Path) -> None:
    """Its name, shape and dtype are compared, and ``--values`` is an error that names it."""
    torch.save({"w": torch.zeros(4, dtype=torch.uint8).view(torch.bits8)}, tmp_path / "a.pt")
    torch.save({"w": torch.ones(4, dtype=torch.uint8).view(torch.bits8)}, tmp_path / "b.pt")
    a, b = tmp_path / "a.pt", tmp_path / "b.pt"
    done = run(a, b, "--values")

    assert run(a, b).exit_code == 0
    assert run(a, a, "--values").exit_code == 0
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1)
    assert "w is bits8, whose values torch does not compare" in done.stderr


def test_the_memory_of_a_comparison(tmp_path: Path) -> None:
    """Two tensors are in memory at most; each file has 16 of them."""
    files = [tmp_path / "a.pt", tmp_path / "b.safetensors"]
    torch.save({f"{n}": torch.full((2_500_000,), 1.0) for n in range(16)}, files[0])
    save_file({f"{n}": torch.full((2_500_000,), 1.5) for n in range(16)}, files[1])
    # 1.5 is equal to 1 with this tolerance: the command ends with the status 0.
    peak = peak_of_command(["diff", *map(str, files), "--values", "--rtol", "0.4"])

    # Both files have 320 MB; a tensor has 10 MB, and the pieces in 64 bits have some more.
    assert peak < 80e6


def test_progress_is_in_percent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With ``--values``, a terminal shows how much is compared."""
    a, b = write(tmp_path, net(), net())
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "100")

    assert "%" in run(a, b, "--values").stderr
