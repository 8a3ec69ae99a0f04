from pathlib import Path

from tests.cases import for_each
from tests.fuzz import fuzz_files
from tests.fuzz.fuzz_files import Fault
from tests.fuzz.mutations import Dice, corrupted
from tests.fuzz.other_inputs import INPUTS, outcome_of_input


@for_each("start", range(0, 300, 60))
def test_damaged_files(start: int) -> None:
    """Each file is refused with FileError, or read as torch reads it."""
    faults: list[Fault] = []
    fuzz_files.run(1, range(start, start + 60), faults.append)

    assert faults == []


def test_inputs_that_are_not_files(tmp_path: Path) -> None:
    """States, snapshots and shards: read, or refused with a documented exception."""
    for name in INPUTS:
        for number in range(12):
            place = tmp_path / f"{name} {number}"
            what, text = outcome_of_input(name, Dice(f"{name} {number}"), place, corrupted)
            assert text == "", f"{name} {number}: {what}"
