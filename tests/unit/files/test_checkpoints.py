import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import modkit
from modkit import nn
from modkit.errors import FileError
from modkit.files.checkpoints import verify_checksums


def training() -> tuple[nn.Module, torch.optim.Optimizer, "modkit.EMA[Any]"]:
    """Return a model with an average that have taken a few steps."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.Adam(model.parameters())
    ema = modkit.EMA(model, precision="fp64").attach(optimizer)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
    return model, optimizer, ema


def checkpoint() -> dict[str, Any]:
    """Return what such a loop saves."""
    names = ("model", "optimizer", "ema")
    parts = {name: part.state_dict() for name, part in zip(names, training(), strict=True)}
    return {**parts, "epoch": 3}


def equal(first: Any, second: Any) -> bool:
    """Compare nested states, tensors by each value."""
    if isinstance(first, torch.Tensor):
        return isinstance(second, torch.Tensor) and torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(equal(first[k], second[k]) for k in first)
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(equal, first, second))
    return bool(first == second)


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    """All that a loop needs to go on comes back, and plain torch reads the file too."""
    expected = checkpoint()
    modkit.save_checkpoint(expected, tmp_path / "last.pt")

    assert equal(modkit.load_checkpoint(tmp_path / "last.pt"), expected)
    assert equal(torch.load(tmp_path / "last.pt", weights_only=True), expected)
    assert [path.name for path in tmp_path.iterdir()] == ["last.pt"]


@pytest.mark.parametrize("length", [2, 100, -1])
def test_a_truncated_file_is_an_error(tmp_path: Path, length: int) -> None:
    """The error names the file."""
    path = tmp_path / "last.pt"
    modkit.save_checkpoint(checkpoint(), path)
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(ValueError, match=r"last\.pt is corrupt: the end of a zip file is missing"):
        modkit.load_checkpoint(path)


def test_checksums_are_there_whatever_is_set(tmp_path: Path) -> None:
    """Files have checksums even if torch's option disables them; the option is kept."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        modkit.save_checkpoint(checkpoint(), tmp_path / "last.pt")
        meanwhile = torch.serialization.get_crc32_options()
    finally:
        torch.serialization.set_crc32_options(before)

    assert meanwhile is False
    assert equal(modkit.load_checkpoint(tmp_path / "last.pt"), checkpoint())


def test_a_file_without_checksums_is_read_with_a_warning(tmp_path: Path) -> None:
    """The warning is at the line of the caller, and names the command that adds checksums."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(checkpoint(), tmp_path / "last.pt")
    finally:
        torch.serialization.set_crc32_options(before)

    with pytest.warns(
        UserWarning, match=r"last\.pt has no checksums, .*`modkit convert`"
    ) as caught:
        found = modkit.load_checkpoint(tmp_path / "last.pt")
    assert equal(found, checkpoint())
    assert caught[0].filename == __file__


def test_saving_over_a_mapped_checkpoint(tmp_path: Path) -> None:
    """The mapped tensors keep their values; Windows cannot replace the file, and the error says so."""
    path = tmp_path / "last.pt"
    modkit.save_checkpoint({"w": torch.ones(1000)}, path)
    mapped = modkit.load_checkpoint(path, mmap=True)
    refuses = os.name == "nt" or os.environ.get("SIMULATED_PLATFORM") == "windows"
    advice = r"Windows does not replace.* tensors of load_checkpoint\(mmap=True\)"
    with pytest.raises(PermissionError, match=advice) if refuses else nullcontext():
        modkit.save_checkpoint({"w": torch.zeros(1000)}, path)
    mean = modkit.load_checkpoint(path)["w"].mean()

    assert mean == float(refuses)
    assert mapped["w"].mean() == 1
    assert list(tmp_path.iterdir()) == [path]

    del mapped
    modkit.save_checkpoint({"w": torch.zeros(1000)}, path)
    assert modkit.load_checkpoint(path)["w"].mean() == 0


def test_only_files_with_checksums_are_verified(tmp_path: Path) -> None:
    """A corrupt file of torch raises an error that names it; another kind of file passes."""
    path, other = tmp_path / "last.pt", tmp_path / "notes.txt"
    modkit.save_checkpoint({"w": torch.ones(100)}, path)
    other.write_text("text")
    for each in (path, other):
        verify_checksums(each)

    content = path.read_bytes()
    path.write_bytes(content.replace(torch.ones(2).numpy().tobytes(), b"\0" * 8, 1))

    with pytest.raises(FileError, match=r"last\.pt is corrupt"):
        verify_checksums(path)
