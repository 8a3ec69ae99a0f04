import hashlib
import io
import zipfile

import pytest
import torch

from modkit.errors import FileError
from modkit.jit._archive import check_archive, inspect
from modkit.jit._archive_seal import SEAL, add_files, seal, sealed
from tests.integration.torchscript import scripted_tests
from tests.unit.jit.archives import archive, changed, loaded, members, net, packed, place_of


pytestmark = scripted_tests


def flipped(data, offset, mask=1):
    """Return the bytes with one of them changed."""
    changed_bytes = bytearray(data)
    changed_bytes[offset] ^= mask
    return bytes(changed_bytes)


def test_a_whole_archive_passes():
    """An archive of torch is accepted, and its extra files are returned with their sizes."""
    assert check_archive(archive()) == {"labels.txt": 7}
    assert check_archive(io.BytesIO(archive()), extra_files=["labels.txt"]) == {"labels.txt": 7}


def test_a_flipped_bit_in_the_weights():
    """Torch loads other weights without a word; here the member that is damaged is named."""
    tensors = {each.name: each for each in inspect(archive()).tensors}
    storage = tensors["body.0.weight"].storage
    damaged = flipped(archive(), place_of(archive(), f"archive/{storage}"), 0x40)

    theirs = loaded(damaged).state_dict()
    assert any(not torch.equal(theirs[name], right) for name, right in net().state_dict().items())
    with pytest.raises(FileError, match=f"the content of {storage} does not match"):
        check_archive(damaged)


def test_a_checksum_of_zero_was_not_computed(tmp_path):
    """An archive that torch wrote without checksums is no damaged one."""
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"weight": torch.ones(3)}, tmp_path / "state.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    without = bytearray(archive())
    with zipfile.ZipFile(io.BytesIO(archive())) as file:
        for info in file.infolist():
            stated = info.CRC.to_bytes(4, "little")
            place = without.index(b"PK\x01\x02", file.start_dir)
            while without[place + 46 : place + 46 + len(info.filename)] != info.filename.encode():
                place = without.index(b"PK\x01\x02", place + 1)
            assert without[place + 16 : place + 20] == stated
            without[place + 16 : place + 20] = bytes(4)

    assert check_archive(bytes(without)) == {"labels.txt": 7}
    with zipfile.ZipFile(tmp_path / "state.pt") as file:
        assert 0 in {info.CRC for info in file.infolist() if info.file_size}


def test_the_digest_of_the_file():
    """The digest that is expected may be written as tools print it; another one is an error."""
    right = hashlib.sha256(archive()).hexdigest()
    wrong = hashlib.sha256(b"").hexdigest()

    assert check_archive(archive(), sha256=right) == {"labels.txt": 7}
    assert check_archive(archive(), sha256=f" SHA256:{right.upper()}\n") == {"labels.txt": 7}
    with pytest.raises(ValueError, match="SHA-256") as caught:
        check_archive(archive(), sha256=wrong)
    assert right in str(caught.value)
    assert wrong in str(caught.value)


@pytest.mark.parametrize("digest", ["", "abc", "g" * 64, "a" * 63])
def test_what_is_no_digest(digest):
    """A digest that cannot be one is refused as such."""
    with pytest.raises(ValueError, match="sha256 has to be 64 hexadecimal digits"):
        check_archive(archive(), sha256=digest)


def test_the_digest_is_compared_first():
    """A file of another kind with another digest is told to be another file."""
    with pytest.raises(ValueError, match="it is another file"):
        check_archive(b"text", sha256="a" * 64)


def test_missing_extra_files():
    """An extra file that is not there is a KeyError that names those that are."""
    with pytest.raises(KeyError, match=r"no extra file 'a\.txt', 'b\.txt'; it has 'labels\.txt'"):
        check_archive(archive(), extra_files=["a.txt", "labels.txt", "b.txt"])
    with pytest.raises(KeyError, match="it has none"):
        check_archive(net().save_to_buffer(), extra_files=["a.txt"])


@pytest.mark.parametrize("name", ["data.pkl", "constants.pkl", "version"])
def test_missing_members(name):
    """An archive without what every archive has is damaged."""
    with pytest.raises(FileError, match=f"{name} is not there"):
        check_archive(changed(archive(), {name: None}))


def test_missing_storage():
    """A storage that is not there is named with the tensor that should be in it."""
    tensor = inspect(archive()).tensors[0]

    with pytest.raises(FileError, match=f"{tensor.name} should be in {tensor.storage}"):
        check_archive(changed(archive(), {tensor.storage: None}))


def test_a_short_storage():
    """A storage with fewer bytes than its tensor has is named."""
    tensor = inspect(archive()).tensors[0]

    with pytest.raises(FileError, match=f"{tensor.name} has a storage of {tensor.nbytes} bytes"):
        check_archive(changed(archive(), {tensor.storage: bytes(tensor.nbytes - 4)}))


def test_two_members_of_one_name():
    """Two members whose names differ in case only are refused: torch would take either."""
    ambiguous = changed(archive(), {"DATA.PKL": b"other"})

    for look in (check_archive, inspect):
        with pytest.raises(FileError, match="two members have the same name"):
            look(ambiguous)


def test_a_member_outside_of_the_folder():
    """A member that is not where the others are is refused: torch would not see it."""
    with pytest.raises(FileError, match="'other/data/0' is not in the folder 'archive/'"):
        check_archive(packed({**members(archive()), "other/data/0": b"1234"}))


@pytest.mark.parametrize("side", ["before", "after", "comment"])
def test_something_around_the_zip_file(side):
    """What stands before or behind the zip is refused: readers differ on what the file holds."""
    around = {
        "before": packed({"archive/data.pkl": b"other"}) + archive(),
        "after": archive() + b"more",
        "comment": archive()[:-2] + b"\x04\x00more",
    }

    for look in (check_archive, inspect):
        with pytest.raises(FileError, match="is damaged: its table of members does not fill"):
            look(around[side])


@pytest.mark.parametrize("seals", [False, True], ids=["torch", "sealed"])
def test_swapped_members(seals):
    """Weights that have changed places have right checksums; the list of the members tells."""
    whole = sealed(archive()) if seals else archive()
    content = members(whole)
    same_size = [name for name, data in content.items() if "/data/" in name and len(data) == 16]
    first, second = (name.partition("/")[2] for name in same_size[1:3])
    swapped = changed(
        whole,
        {first: content[f"archive/{second}"], second: content[f"archive/{first}"]},
    )

    assert content[f"archive/{first}"] != content[f"archive/{second}"]
    if not seals:
        # Nothing in torch's own archives says which weights belong where; a digest does.
        assert check_archive(swapped) == {"labels.txt": 7}
        with pytest.raises(ValueError, match="another file"):
            check_archive(swapped, sha256=hashlib.sha256(whole).hexdigest())
        return
    with pytest.raises(FileError, match=f"{first} is not what was saved|{second} is not what"):
        check_archive(swapped)


def test_a_sealed_archive_is_an_archive(tmp_path):
    """A list of its members changes nothing for torch, and is no extra file of the user."""
    path = tmp_path / "net.pt"
    path.write_bytes(archive())
    before = inspect(path)
    seal(path)

    info = inspect(path)
    inputs = torch.randn(2, 3)
    assert info.extra_files == before.extra_files
    assert info.content_sha256 == before.content_sha256
    assert check_archive(path) == {"labels.txt": 7}
    assert torch.equal(net()(inputs), loaded(path.read_bytes())(inputs))


@pytest.mark.parametrize("change", ["missing", "other", "broken"])
def test_what_a_seal_finds(change):
    """A member that was taken out or replaced is named; a list that is none is damage."""
    whole = sealed(archive())
    code = next(name for name in members(whole) if name.endswith(".py")).partition("/")[2]
    new = {"missing": {code: None}, "other": {code: b"x = 1"}, "broken": {SEAL: b"{"}}

    with pytest.raises(FileError, match=r"is missing|is not what was saved|members\.json"):
        check_archive(changed(whole, new[change]))


def test_files_can_be_added(tmp_path):
    """A file that is put into a sealed archive afterwards is there for torch and for modkit."""
    path = tmp_path / "net.pt"
    path.write_bytes(sealed(archive()))
    add_files(path, {"notes.txt": "später", "raw": b"\0"})
    wanted = {"notes.txt": "", "labels.txt": "", "raw": ""}
    torch.jit.load(path, _extra_files=wanted)

    assert check_archive(path) == {"labels.txt": 7, "notes.txt": 7, "raw": 1}
    assert wanted == {"notes.txt": "später".encode(), "labels.txt": b"cat,dog", "raw": b"\0"}


def test_files_are_not_replaced(tmp_path):
    """A file that is there already is refused, before anything is written."""
    path = tmp_path / "net.pt"
    path.write_bytes(archive())

    with pytest.raises(ValueError, match=r"has an extra file 'labels\.txt' already"):
        add_files(path, {"other.txt": "", "labels.txt": ""})
    assert path.read_bytes() == archive()


def test_saving_twice_gives_the_same_bytes():
    """What is written into an archive does not depend on the time."""
    assert sealed(archive()) == sealed(archive())


def test_an_archive_is_sealed_once():
    """A second list of members is refused."""
    with pytest.raises(ValueError, match=r"has a member 'modkit\.members\.json' already"):
        sealed(sealed(archive()))


def test_functions_are_archives_too():
    """The archive of a compiled function passes, and loads."""
    buffer = io.BytesIO()
    torch.jit.save(torch.jit.script(_double), buffer)

    assert check_archive(buffer) == {}
    assert torch.equal(torch.full((2,), 2.0), loaded(buffer.getvalue())(torch.ones(2)))


def _double(values: torch.Tensor) -> torch.Tensor:
    """Return twice the values."""
    return values * 2
