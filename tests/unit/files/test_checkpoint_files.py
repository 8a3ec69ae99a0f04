import zlib
from collections import UserDict
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from modkit import average_checkpoints
from modkit.averaging import checkpoints
from modkit.errors import FileError
from modkit.files import zip_archive
from tests.cases import for_each


def saved(directory: Path, contents: list) -> list[Path]:
    """Write each content to a file of torch."""
    paths = [directory / f"{index}.pt" for index in range(len(contents))]
    for path, content in zip(paths, contents, strict=True):
        torch.save(content, path)
    return paths


def tied(value: float) -> dict[str, torch.Tensor]:
    """Return a state in which two names are one tensor, and a third is a part of it."""
    weight = torch.full((4, 2), value)
    return {"embed": weight, "part": weight[1:3], "head": weight}


def test_foreign_classes_do_not_hide_the_tensors(tmp_path) -> None:
    """The tensors at a key are read, whatever else is in the file; an entry beside them is named."""
    paths = saved(tmp_path, [{"model": {"w": torch.ones(1)}, "options": Path("x")}])

    assert average_checkpoints(paths, key="model") == {"w": torch.ones(1)}
    with pytest.raises(FileError, match=r"0\.pt: 'model' is not a tensor.*choose a key: model$"):
        average_checkpoints(paths)


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        (torch.eye(2).to_sparse(), "a tensor without plain memory"),
        (torch.ones(2, device="meta"), "a tensor without plain memory"),
        (3, "not a tensor but int"),
    ],
    ids=["sparse", "meta", "number"],
)
def test_an_entry_that_cannot_be_averaged_is_named(tmp_path, entry, problem: str) -> None:
    """The error names the file, the tensor and the reason."""
    paths = saved(tmp_path, [{"fine": torch.ones(1), "odd": entry}])

    with pytest.raises(ValueError, match=rf"0\.pt: 'odd' is {problem}"):
        average_checkpoints(paths)


def test_names_that_are_numbers_are_refused(tmp_path) -> None:
    """The state of an optimizer is not a state dict of a model."""
    with pytest.raises(ValueError, match="0 is not the name of a tensor"):
        average_checkpoints(saved(tmp_path, [{0: torch.ones(1)}]))


def test_a_state_dict_of_an_allowed_class(tmp_path) -> None:
    """A mapping that is not a dict is read too, where the user allows its class."""
    with torch.serialization.safe_globals([UserDict]):
        paths = saved(tmp_path, [{"ema": UserDict(w=torch.full((2,), n))} for n in (1.0, 3.0)])

        assert average_checkpoints(paths, key="ema")["w"].tolist() == [2.0, 2.0]


@pytest.mark.parametrize("free", [0, 1])
def test_tensors_that_are_tied_in_one_file_only_are_averaged_apart(tmp_path, free: int) -> None:
    """Where a file has two values for two names, so has the average."""
    states = [tied(1.0), tied(3.0)]
    states[free]["head"] = torch.full((4, 2), 10.0)
    found = average_checkpoints(saved(tmp_path, states))

    assert found["embed"].tolist() == [[2.0, 2.0]] * 4
    assert found["head"].tolist() == [[(10 + states[1 - free]["embed"][0, 0].item()) / 2] * 2] * 4


def test_versions_of_modules_are_kept(tmp_path) -> None:
    """The versions of modules in `state_dict()._metadata` are those of the first file."""
    net = nn.Sequential(nn.BatchNorm1d(2))
    found = average_checkpoints(saved(tmp_path, [net.state_dict(), net.state_dict()]))

    assert found._metadata == net.state_dict()._metadata
    assert found._metadata["0"] == {"version": 2}


def test_a_value_that_the_dtype_cannot_hold_is_refused(tmp_path) -> None:
    """A finite number does not become infinite; one that is infinite already may stay so."""
    large = saved(tmp_path, [{"fine": torch.ones(1), "large": torch.tensor([1.0, 7e4])}])

    with pytest.raises(
        ValueError, match=r"large has the value 70000\.0, too large for torch\.float16"
    ):
        average_checkpoints(large, dtype=torch.float16)
    infinite = saved(tmp_path, [{"mask": torch.tensor([1.0, -torch.inf])}])
    assert average_checkpoints(infinite, dtype=torch.float16)["mask"].tolist() == [1.0, -torch.inf]


@for_each("length", [0, 5, 8, 20, -1, -30])
def test_a_cut_off_file_is_refused(tmp_path, length: int) -> None:
    """A safetensors file whose header or whose tensors are not all there is named."""
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.ones(4), "b": torch.ones(4), "c": torch.ones(4)}, path)
    path.write_bytes(path.read_bytes()[:length])

    # The content decides: so short a file may be anything.
    reason = "is corrupt: " if length < 0 or length > 8 else "is an (empty|unknown) file"
    with pytest.raises(FileError, match=rf"x\.safetensors {reason}"):
        average_checkpoints([path])


def test_a_missing_shard_is_told_with_a_tensor_that_it_has(tmp_path) -> None:
    """The error names a tensor of the missing shard."""
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text('{"weight_map": {"layer.weight": "1.bin"}}')

    with pytest.raises(FileNotFoundError, match=r"1\.bin is missing; .* lists layer\.weight in it"):
        average_checkpoints([index])


def test_a_file_that_is_replaced_meanwhile_is_compared_again(tmp_path, monkeypatch) -> None:
    """A run that goes on may write another checkpoint to the same name."""
    paths = saved(tmp_path, [{"w": torch.ones(1)}, {"w": torch.ones(1)}])
    opened = 0

    class Replaced(checkpoints.Checkpoint):
        def __init__(self, *args, **options) -> None:
            nonlocal opened
            opened += 1
            if opened == 3:
                torch.save({"other": torch.ones(1)}, paths[1])
            super().__init__(*args, **options)

    monkeypatch.setattr(checkpoints, "Checkpoint", Replaced)

    with pytest.raises(ValueError, match=r"1\.pt does not fit .*1 missing: w"):
        average_checkpoints(paths)


def test_a_shared_storage_is_read_once(tmp_path, monkeypatch) -> None:
    """Tensors in one storage are read together, and verified."""
    (path,) = saved(tmp_path, [tied(1.0)])
    checkpoint = checkpoints.Checkpoint(path)
    calls = []
    crc32 = zlib.crc32
    monkeypatch.setattr(zip_archive, "crc32", lambda *data: calls.append(1) or crc32(*data))
    for name in checkpoint.shapes:
        checkpoint.tensor(name)

    assert len(calls) == 1
