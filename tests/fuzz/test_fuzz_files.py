from collections import Counter
from pathlib import Path

import pytest
import torch

from tests.cases import for_each
from tests.fuzz import fuzz_files
from tests.fuzz.fuzz_files import Fault, faults_of
from tests.fuzz.mutations import CHECKED, UNCHECKED, Case, case, seeds


@for_each("start", range(0, 300, 60))
def test_damaged_files(start: int) -> None:
    """Each file is refused with FileError, or read as torch reads it."""
    faults: list[Fault] = []
    fuzz_files.run(1, range(start, start + 60), faults.append)

    assert faults == []


def test_the_same_files_each_time() -> None:
    """A seed and a number give one file."""
    assert [case(3, number) for number in range(40)] == [case(3, number) for number in range(40)]
    assert {case(0, number).how for number in range(200)} == {*CHECKED, *UNCHECKED}


def test_faults_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that misses corruption, or raises another exception, is reported."""
    data = bytearray(seeds()["plain"])
    at = data.index(torch.arange(16.0).numpy().tobytes())
    data[at + 5] ^= 4
    corrupted = Case("plain", "by hand", bytes(data), checked=False)
    assert list(faults_of(corrupted, 1, tmp_path, Counter())) == []
    monkeypatch.setitem(
        fuzz_files.READERS, "load_checkpoint", (fuzz_files.torch_load, fuzz_files.torch_load)
    )
    (fault,) = faults_of(corrupted, 1, tmp_path, Counter())
    assert fault[:3] == (1, "load_checkpoint", "read otherwise")
    cut_off = Case("plain", "by hand", bytes(data[:-30]), checked=False)
    (fault,) = faults_of(cut_off, 1, tmp_path, Counter())
    assert fault[:3] == (1, "load_checkpoint", "leak")
