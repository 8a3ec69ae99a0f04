import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import modkit
from modkit.files.tensor_files import Checkpoint
from tests.cases import for_each
from tests.processes import python


NAMES = 4
NUMBERS = 50_000
FILES = 6
CHECKPOINT = NAMES * NUMBERS * 4


def live_bytes() -> int:
    """Return how many bytes the tensors of this process hold, each storage counted once."""
    storages: dict[int, int] = {}
    # Frozen are the many objects of earlier tests.
    for each in gc.get_objects():
        if type(each) is torch.Tensor and each.device.type == "cpu" and not each.is_sparse:
            storage = each.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


@for_each("suffix", ["pt", "safetensors"])
@for_each("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_more_is_held_than_the_sum_and_one_checkpoint(
    suffix: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory holds the tensors of at most two checkpoints, for any number of files."""
    paths = [tmp_path / f"{index}.{suffix}" for index in range(FILES)]
    for index, path in enumerate(paths):
        state = {f"{n}": torch.full((NUMBERS,), float(index), dtype=dtype) for n in range(NAMES)}
        if suffix == "pt":
            torch.save(state, path)
        else:
            save_file(state, path)
    del state
    gc.collect()
    gc.freeze()
    read, found = Checkpoint.tensor, []

    def watched(checkpoint: Checkpoint, name: str) -> Any:
        tensor = read(checkpoint, name)
        found.append(live_bytes())
        return tensor

    monkeypatch.setattr(Checkpoint, "tensor", watched)
    before = live_bytes()
    averages = modkit.average_checkpoints(paths)

    assert all(torch.equal(a, torch.full((NUMBERS,), 2.5, dtype=dtype)) for a in averages.values())
    assert len(found) == FILES * NAMES
    assert max(found) - before <= 2 * CHECKPOINT


MAPPED = """
import sys, pathlib, modkit

def peak():
    status = pathlib.Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0])

modkit.load_checkpoint(sys.argv[2])
before = peak()
found = modkit.load_checkpoint(sys.argv[1], mmap=True)
print(peak() - before, float(found["9"][-1]))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_a_mapped_checkpoint_takes_no_memory(tmp_path: Path) -> None:
    """Verifying and mapping 80 MB adds less than a tenth of that to the peak of the process."""
    path, small = tmp_path / "large.pt", tmp_path / "small.pt"
    modkit.save_checkpoint({str(n): torch.full((2_000_000,), float(n)) for n in range(10)}, path)
    modkit.save_checkpoint({"w": torch.ones(2)}, small)
    kilobytes, last = python(MAPPED, path, small).stdout.split()

    assert float(last) == 9.0
    assert int(kilobytes) < 8_000
