import math
import weakref
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from modkit import average_checkpoints
from modkit.averaging import checkpoints
from modkit.errors import NameMismatchError
from tests.cases import for_each
from tests.helpers import freeze


def written(directory: Path, states: list[dict], kind: str = "pt") -> list[Path]:
    """Write one file for each state and return their paths."""
    paths = [directory / f"{index}.{kind}" for index in range(len(states))]
    for path, state in zip(paths, states, strict=True):
        save_file(state, path) if kind == "safetensors" else torch.save(state, path)
    return paths


def states(count: int, dtype: torch.dtype = torch.float32) -> list[dict[str, torch.Tensor]]:
    """Return states of one model at several times."""
    generator = torch.Generator().manual_seed(0)
    return [
        {
            "weight": torch.randn(3, 4, generator=generator).to(dtype),
            "count": torch.tensor(step),
            "mask": torch.tensor([step % 2 == 0]),
        }
        for step in range(count)
    ]


@for_each("kind", ["pt", "safetensors"])
@for_each("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@for_each("weights", [None, [1, 2, 3, 4], [0, 0, 1, 0], [0.5, 0, 0, 0.25]])
def test_the_average_is_the_weighted_mean(tmp_path, kind: str, dtype, weights) -> None:
    """Floats are averaged in at least 32 bits, integers and booleans are those of the last file."""
    saved = states(4, dtype)
    found = average_checkpoints(written(tmp_path, saved, kind), weights)
    shares = torch.tensor(weights or [1.0] * 4, dtype=torch.float64)
    stacked = torch.stack([state["weight"].double() for state in saved])
    expected = (stacked * (shares / shares.sum()).reshape(-1, 1, 1)).sum(0)

    assert found["weight"].dtype == dtype
    torch.testing.assert_close(
        found["weight"], expected.to(dtype), rtol=1e-2 if dtype.itemsize == 2 else 1e-6, atol=1e-6
    )
    assert found["count"].item() == 3
    assert found["mask"].tolist() == [False]
    assert set(found) == {"weight", "count", "mask"}


def test_equal_files_are_their_average(tmp_path) -> None:
    """The mean of equal values is bitwise identical to them, and so are the infinities of a mask."""
    mask = torch.full((3, 3), -math.inf).triu(1).neg()
    state = {**states(1)[0], "mask": mask, "half": mask.half(), "complex": mask + 0j}
    found = average_checkpoints(written(tmp_path, [state] * 7), [0.1, -0.7, 3, 1, 1, 1, 1e-9])

    for name in ("weight", "mask", "half", "complex"):
        assert repr(found[name].tolist()) == repr(state[name].tolist())


def test_sharded_files(tmp_path) -> None:
    """The index of a sharded checkpoint stands for its shards."""
    saved = states(2)
    paths = []
    for index, state in enumerate(saved):
        directory = tmp_path / str(index)
        directory.mkdir()
        names = {"weight": "a.safetensors", "count": "b.safetensors", "mask": "b.safetensors"}
        for file in set(names.values()):
            save_file({n: t for n, t in state.items() if names[n] == file}, directory / file)
        paths.append(directory / "model.safetensors.index.json")
        paths[-1].write_text(str({"weight_map": names}).replace("'", '"'))
    found = average_checkpoints(paths)
    whole = average_checkpoints(written(tmp_path, saved))
    (tmp_path / "1" / "b.safetensors").unlink()

    assert all(torch.equal(found[name], whole[name]) for name in whole)
    with pytest.raises(FileNotFoundError, match=r"b\.safetensors"):
        average_checkpoints(paths)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("weight"), r"1\.pt does not fit .*0\.pt: 1 missing: weight"),
        (lambda state: state.update(head=torch.ones(1)), "1 unexpected: head"),
        (
            lambda state: state.update(weight=torch.ones(2)),
            r"weight \(\(2,\) instead of \(3, 4\)\)",
        ),
    ],
    ids=["missing", "unexpected", "shape"],
)
def test_files_that_differ_are_refused(tmp_path, change, message: str) -> None:
    """The file and the first names are told."""
    saved = states(2)
    change(saved[1])

    with pytest.raises(NameMismatchError, match=message):
        average_checkpoints(written(tmp_path, saved))


@pytest.mark.parametrize("kind", ["pt", "safetensors"])
def test_files_that_are_no_checkpoints_are_refused(tmp_path, kind: str) -> None:
    """Empty, cut and missing files are named."""
    whole, cut = written(tmp_path, states(2), kind)
    cut.write_bytes(cut.read_bytes()[:-20])
    empty = tmp_path / f"empty.{kind}"
    empty.touch()

    for path in (cut, empty):
        with pytest.raises(ValueError, match=f"{path.name} is (corrupt|an empty file)"):
            average_checkpoints([whole, path])
    with pytest.raises(FileNotFoundError, match="nothing"):
        average_checkpoints([whole, tmp_path / f"nothing.{kind}"])


def test_contents_that_are_no_tensors_are_refused(tmp_path) -> None:
    """A training checkpoint says under which key its model may be."""
    training = {"model": states(1)[0], "epoch": 3}
    paths = written(tmp_path, [training, [1, 2], {}])

    with pytest.raises(ValueError, match=r"'model' is not a tensor but .*choose a key: model"):
        average_checkpoints(paths[:1])
    with pytest.raises(ValueError, match=r"0\.pt has no state dict at the key 'ema'"):
        average_checkpoints(paths[:1], key="ema")
    with pytest.raises(ValueError, match="holds list, not a state dict"):
        average_checkpoints(paths[1:2])
    for value, kind in (
        (torch.float16, "a dtype"),
        (torch.ones(2).untyped_storage(), "a storage"),
        (Namespace(name=5), "Namespace"),
    ):
        path = written(tmp_path, [{"entry": value}])
        with pytest.raises(ValueError, match=f"'entry' is not a tensor but {kind}"):
            average_checkpoints(path)
    with pytest.raises(ValueError, match="holds a tensor, not a state dict"):
        average_checkpoints(written(tmp_path, [torch.ones(2)]))
    paths = written(tmp_path, [training, [1, 2], {}])
    with pytest.raises(ValueError, match=r"2\.pt holds no tensors"):
        average_checkpoints(paths[2:])


@for_each("weights", [[1.0], [0.0, 0.0], [1.0, -1.0], [1.0, float("nan")], [1e308, 1e308]], ids=str)
def test_arguments_that_make_no_sense_are_refused(tmp_path, weights) -> None:
    """Paths are a list with a file or more; there is a finite weight of 0 or more for each, not all 0."""
    with pytest.raises(ValueError, match="weights"):
        average_checkpoints(written(tmp_path, states(2)), weights)
    # A string would be taken apart into its characters.
    with pytest.raises(TypeError, match=r"paths must be a list of files, got 'a\.pt'"):
        average_checkpoints("a.pt")
    with pytest.raises(ValueError, match="no file to average"):
        average_checkpoints([])


def test_a_file_of_weight_zero_does_not_count(tmp_path) -> None:
    """Non-finite values there do not reach the average."""
    saved = states(2)
    saved[0]["weight"].fill_(float("nan"))
    found = average_checkpoints(written(tmp_path, saved), [0, 1])

    assert torch.equal(found["weight"], saved[1]["weight"])


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("other", [torch.int64, torch.complex64], ids=str)
def test_kinds_that_differ_are_refused(tmp_path, swapped: bool, other: torch.dtype) -> None:
    """Floats in one file and integers or complex numbers of the same name in another have no average."""
    saved = [{"x": torch.ones(2)}, {"x": torch.ones(2, dtype=other)}]
    paths = written(tmp_path, saved[::-1] if swapped else saved)
    dtypes = [other, torch.float32] if swapped else [torch.float32, other]

    with pytest.raises(ValueError, match=rf"1\.pt: x is {dtypes[1]}, and {dtypes[0]} in the first"):
        average_checkpoints(paths)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_averages_of_eight_bits(tmp_path, dtype) -> None:
    """A dtype of 8 bits, for which torch has no `isfinite`, may be that of the averages."""
    paths = written(tmp_path, [{"a": torch.tensor([value])} for value in (1.0, 3.0)])
    average = average_checkpoints(paths, dtype=dtype)["a"]

    assert average.dtype == dtype
    assert average.float().item() == 2.0


@for_each("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz])
def test_a_value_that_is_too_large_for_eight_bits(tmp_path, dtype) -> None:
    """It is refused, although torch casts it to the maximum of a dtype without infinity."""
    largest = torch.finfo(dtype).max
    torch.save({"w": torch.tensor([1.0, -largest])}, tmp_path / "fits.pt")
    torch.save({"w": torch.tensor([1.0, -2 * largest])}, tmp_path / "large.pt")

    average = average_checkpoints([tmp_path / "fits.pt"], dtype=dtype)
    assert average["w"].tolist() == [1.0, -largest]
    with pytest.raises(ValueError, match=rf"w has the value -{2 * largest}, too large for {dtype}"):
        average_checkpoints([tmp_path / "large.pt"], dtype=dtype)


def test_tied_tensors_are_averaged_each(tmp_path) -> None:
    """Also a matrix and its transpose, which share memory."""
    matrix = torch.arange(4.0).reshape(2, 2)
    paths = written(tmp_path, [{"a": matrix, "b": matrix.t(), "c": matrix}] * 2)
    average = average_checkpoints(paths)

    assert freeze(average) == freeze({"a": matrix, "b": matrix.t(), "c": matrix})


def test_one_checkpoint_is_open_at_a_time(tmp_path, monkeypatch) -> None:
    """A file is let go of before the next one is opened."""
    opened: list[weakref.ref] = []
    most = 0

    class Counted(checkpoints.Checkpoint):
        def __init__(self, *args, **options) -> None:
            nonlocal most
            most = max(most, 1 + sum(ref() is not None for ref in opened))
            opened.append(weakref.ref(self))
            super().__init__(*args, **options)

    monkeypatch.setattr(checkpoints, "Checkpoint", Counted)
    average_checkpoints(written(tmp_path, states(3)))

    assert len(opened) == 6
    assert most <= 2
