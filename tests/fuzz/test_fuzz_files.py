from collections import Counter
from pathlib import Path

import pytest
import torch

from tests.cases import for_each
from tests.fuzz import fuzz_files
from tests.fuzz.fuzz_files import Fault, faults_of
from tests.fuzz.mutations import CHECKED, UNCHECKED, Case, Dice, case, corrupted, seeds
from tests.fuzz.other_inputs import INPUTS, Surprise, check_unchanged, outcome_of_input


@for_each("start", range(0, 300, 60))
def test_damaged_files(start: int) -> None:
    """Each file is refused with FileError, or read as torch reads it."""
    faults: list[Fault] = []
    fuzz_files.run(1, range(start, start + 60), faults.append)

    assert faults == []


def test_the_same_files_each_time() -> None:
    """A seed and a number give one file."""
    assert [case(3, number) for number in range(40)] == [case(3, number) for number in range(40)]
    assert {case(0, number).how for number in range(200)} == {*CHECKED, *UNCHECKED, "other"}


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


def test_inputs_that_are_not_files(tmp_path: Path) -> None:
    """States, snapshots, shards and commands: read, or refused with a documented exception."""
    for name in INPUTS:
        for number in range(12):
            place = tmp_path / f"{name} {number}"
            what, text = outcome_of_input(name, Dice(f"{name} {number}"), place, corrupted)
            assert text == "", f"{name} {number}: {what}"


def test_a_refused_state_that_changes_something_is_seen() -> None:
    """A state that differs in one element is another one."""
    before = {"w": torch.arange(3.0)}
    check_unchanged(before, {"w": torch.arange(3.0)})

    with pytest.raises(Surprise, match="something has changed"):
        check_unchanged(before, {"w": torch.arange(3.0) + 1})
