import collections
import io
import itertools
import random
import struct
import sys
import zipfile
from pathlib import Path

import pytest

from modkit.errors import FileError
from modkit.files.torchscript_files import verified_archive
from tests.integration.torchscript import scripted_tests
from tests.processes import python
from tests.unit.jit.archives import archive, members, net, place_of


pytestmark = scripted_tests

LOADS = Path(__file__).with_name("torchscript_loads.py")


def flip(data, offset, bit):
    """Return the bytes with one bit changed."""
    changed = bytearray(data)
    changed[offset] ^= 1 << bit
    return bytes(changed)


def passes(data):
    """Return True if a file passes the verification; an error of another kind fails the test."""
    try:
        with verified_archive(io.BytesIO(data)):
            return True
    except FileError:
        return False


def accepted(cases):
    """Return the files that the check lets through."""
    return [data for data in cases if passes(data)]


def outcomes(folder, cases, library="modkit"):
    """Load files in another process, and return what came of each; a crash is an outcome too."""
    (folder / "whole.pt").write_bytes(archive())
    left = {f"case-{number:05}.pt": data for number, data in enumerate(cases)}
    found = {}
    while left:
        for path in folder.glob("case-*.pt"):
            path.unlink()
        for name, data in left.items():
            (folder / name).write_bytes(data)
        run = python(LOADS, library, folder)
        lines = [line.partition(" ") for line in run.stdout.splitlines()]
        found |= {name: result for name, _, result in lines}
        left = {name: data for name, data in left.items() if name not in found}
        if run.returncode and left:
            died = min(left)
            found[died] = f"CRASHED with {run.returncode}: {run.stderr[-300:]}"
            del left[died]
    return list(found.values())


def assert_harmless(folder, cases):
    """Hold that each file is refused, or has the right weights; return how many came to what."""
    results = outcomes(folder, cases)

    assert [each for each in results if not each.startswith(("right", "refused"))] == []
    assert len(results) == len(cases)
    return collections.Counter(results)


def random_flips(seed, count):
    """Return archives with one bit changed at random places."""
    chance = random.Random(seed)
    whole = archive()
    return [flip(whole, chance.randrange(len(whole)), chance.randrange(8)) for _ in range(count)]


def test_bit_flips(tmp_path):
    """A bit that flips at any of 120 random places is found, or changes nothing."""
    counts = assert_harmless(
        tmp_path, [flip for seed in range(3) for flip in random_flips(seed, 40)]
    )

    assert counts["refused FileError"] > 60


def test_torch_alone_loads_wrong_weights(tmp_path):
    """Without the check, some of the same files load with other weights than were saved."""
    contents = {value.numpy().tobytes() for value in net().state_dict().values()}
    names = [name for name, data in members(archive()).items() if data in contents]
    places = [place_of(archive(), name) for name in names]
    cases = [flip(archive(), place + 1, 4) for place in places]

    assert "WRONG" in outcomes(tmp_path, cases, "torch")
    assert accepted(cases) == []


@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_bits_of_the_table_of_members(step):
    """The table at the end of the file, which no checksum covers, is never believed blindly."""
    whole = archive()
    with zipfile.ZipFile(io.BytesIO(whole)) as file:
        start = file.start_dir
    names = members(whole)

    for data in accepted(
        flip(whole, place, bit) for place in range(start, len(whole), step) for bit in (0, 5)
    ):
        assert members(data) == names


def test_truncations(tmp_path):
    """A file that ends early is refused, wherever it ends."""
    whole = archive()
    lengths = {*range(0, len(whole), len(whole) // 300), *range(len(whole) - 130, len(whole))}
    cases = [whole[:length] for length in sorted(lengths)]

    assert accepted(cases) == []
    assert set(outcomes(tmp_path, cases[::20])) == {"refused FileError"}


def test_blocks_of_zeros():
    """A block of the disk that was never written is found in every member that it touches."""
    whole = archive()
    cases = [
        whole[:start] + bytes(512) + whole[start + 512 :] for start in range(0, len(whole), 512)
    ]

    assert accepted(case for case in cases if len(case) == len(whole)) == []


def test_members_that_change_places_without_new_checksums():
    """Members of equal size that are swapped on disk do not match their checksums."""
    content = members(archive())
    names = [name for name in content if "/data/" in name]

    for first, second in itertools.combinations(names, 2):
        one, two = content[first], content[second]
        if len(one) == len(two) and one != two:
            left, right = place_of(archive(), first), place_of(archive(), second)
            data = bytearray(archive())
            data[left : left + len(one)], data[right : right + len(two)] = two, one
            assert accepted([bytes(data)]) == []


def directory(data):
    """Yield where each entry of the table of members begins, with the name of the member."""
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        place = file.start_dir
        for info in file.infolist():
            yield place, info.filename
            name, extra, comment = struct.unpack("<3H", data[place + 28 : place + 34])
            place += 46 + name + extra + comment


def test_a_member_that_is_marked_as_a_folder(tmp_path):
    """Torch reads nothing of such a member, and takes what memory holds for weights; it is refused."""
    parts = {name: place for place, name in directory(archive())}
    names = ["data/" + str(number) for number in range(3)]
    cases = [flip(archive(), parts[f"archive/{name}"] + 38, 4) for name in names]

    for name, case in zip(names, cases, strict=True):
        match = f"'archive/{name}' is marked as a folder"
        with pytest.raises(FileError, match=match), verified_archive(io.BytesIO(case)):
            pass
    assert set(outcomes(tmp_path, cases)) == {"refused FileError"}


@pytest.mark.parametrize("field", ["size", "packed size", "place"])
def test_sizes_and_places_that_point_elsewhere(field, tmp_path):
    """A table whose sizes or places point somewhere else does not make torch read there."""
    offset = {"packed size": 20, "size": 24, "place": 42}[field]

    cases = []
    for place, _ in directory(archive()):
        for value in (0, 1, 2**16, 2**31 - 1, 2**32 - 2):
            data = bytearray(archive())
            data[place + offset : place + offset + 4] = struct.pack("<I", value)
            cases.append(bytes(data))
    assert_harmless(tmp_path, [case for case in cases if case != archive()])


@pytest.mark.slow
@pytest.mark.parametrize("bit", range(8))
def test_every_bit_that_no_checksum_covers(bit, tmp_path):
    """Whichever bit of the headers and the table flips, no wrong weight is loaded."""
    whole = archive()
    covered = set()
    for name, content in members(whole).items():
        start = place_of(whole, name)
        covered.update(range(start, start + len(content)))
    left = [place for place in range(len(whole)) if place not in covered]

    assert len(left) > 2000
    counts = assert_harmless(tmp_path, [flip(whole, place, bit) for place in left])
    sys.stdout.write(f"{sorted(counts.items())}\n")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 12))
def test_many_more_bit_flips(seed, tmp_path):
    """1,000 random flips for each seed are refused or harmless."""
    counts = assert_harmless(tmp_path, random_flips(seed, 1000))

    sys.stdout.write(f"{sorted(counts.items())}\n")
    assert counts["refused FileError"] > 500
