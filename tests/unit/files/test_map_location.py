"""Devices for the tensors of a file: mapped as torch maps them, and verified in one read."""

from collections import Counter

import pytest
import torch

import modkit
from modkit._upstream import shares_all_storages
from modkit.errors import FileError
from modkit.files import checkpoints, zip_archive
from tests.cases import for_each
from tests.unit.files import hostile
from tests.unit.files.checkpoint_zoo import file_written, quiet
from tests.unit.files.raw_zip import build, unpacked
from tests.unit.files.same_objects import assert_same, outcome
from tests.unit.files.test_same_as_torch_load import written


def nothing(storage, location):
    """Leave the decision to torch."""


def failing(storage, location):
    """Raise, as the function of a user can."""
    raise ZeroDivisionError(location)


def to_unknown(storage, location):
    """Return what is not a storage."""
    return torch.ones(storage.nbytes() // 4)


def to_meta(storage, location):
    """Return a storage without memory."""
    return torch.UntypedStorage(storage.nbytes(), device="meta")


LOCATIONS = {
    "none": None,
    "cpu": "cpu",
    "device": torch.device("cpu"),
    "meta": "meta",
    "meta as a device": torch.device("meta"),
    "hit": {"cpu": "meta"},
    "hit without effect": {"cpu": "cpu"},
    "miss": {"cuda:0": "cpu"},
    "function": lambda storage, location: storage,
    "clone": lambda storage, location: storage.clone(),
    "function to meta": to_meta,
    "function without result": nothing,
}
# Of the caller, not of the file: torch's own error.
WRONG = {
    "cuda": "cuda",
    "cuda:0": "cuda:0",
    "device": torch.device("cuda", 1),
    "xpu": torch.device("xpu"),
    "mps": "mps:0",
    "index": "cpu:0",
    "index of meta": "meta:0",
    "unknown": "nowhere",
    "bytes": b"cpu",
    "hit": {"cpu": "cuda:0"},
    "device in a dict": {"cpu": torch.device("cpu")},
    "none in a dict": {"cpu": None},
    "int": 0,
    "function": failing,
}


CALLED = [
    *("ties", "views", "shapes", "modules", "parameters", "storages", "attributes"),
    *("circles", "bits", "sparse", "quantized", "plain", "cuda"),
]


@pytest.fixture
def path(tmp_path):
    """A file with tensors that are read in pieces, and others."""
    content = {
        "large": torch.rand(300, 301),
        "views": [(base := torch.rand(200_000))[1:], base.reshape(100, -1).T],
        "small": torch.arange(6),
        "parameter": torch.nn.Parameter(torch.rand(70_000)),
        "empty": [torch.empty(0), torch.empty(3, 0)],
        "step": 3,
    }
    torch.save({**content, "tied": content["large"]}, tmp_path / "file.pt")
    return tmp_path / "file.pt"


@pytest.fixture
def bytes_read(monkeypatch):
    """Count what is read."""
    count = Counter()
    for name, size in (("read_at", len), ("read_into_at", int)):

        def read(*arguments, name=name, size=size, function=getattr(zip_archive, name)):
            result = function(*arguments)
            count["bytes"] += size(result)
            return result

        monkeypatch.setattr(zip_archive, name, read)
    return count


@for_each("name", LOCATIONS)
@for_each("mmap", [False, True])
def test_results(name, mmap, path):
    """Tensors are where torch puts them, and share memory as torch's do."""
    options = {"map_location": LOCATIONS[name], "mmap": mmap}

    assert_same(modkit.load_checkpoint(path, **options), torch.load(path, **options))


@for_each("name", WRONG)
@for_each("mmap", [False, True])
def test_errors(name, mmap, path):
    """A device that is not there is not an error of the file: type and text are torch's."""
    options = {"map_location": WRONG[name], "mmap": mmap}
    expected = outcome(torch.load, path, **options)[1]
    found = outcome(modkit.load_checkpoint, path, **options)[1]

    assert expected is not None
    assert (type(found), str(found)) == (type(expected), str(expected))


def test_errors_of_the_file(tmp_path):
    """A place that the file names, and that does not exist, is an error of the file by default."""
    path = tmp_path / "cuda.pt"
    path.write_bytes(file_written("cuda"))
    expected = outcome(torch.load, path)[1]
    with pytest.raises(FileError) as caught:
        modkit.load_checkpoint(path)
    text = str(expected).partition("\n")[0]
    assert str(caught.value).endswith(f"cuda.pt cannot be read as a checkpoint: {text}")

    for location in ({"cpu": "cpu"}, nothing):
        found = outcome(modkit.load_checkpoint, path, location)[1]
        assert (type(found), str(found)) == (type(expected), str(expected))


def test_locations_that_are_not_printable(tmp_path):
    """Control characters in a location that a file names are escaped."""
    path = tmp_path / "file.pt"
    torch.save({"w": torch.ones(3)}, path)
    members = unpacked(path.read_bytes())
    for member in members:
        if member.name.endswith(b"data.pkl"):
            member.data = member.data.replace(b"\x03\x00\x00\x00cpu", b"\x03\x00\x00\x00a\x1bb")
    path.write_bytes(build(members))

    for location in (None, {"cpu": "cpu"}, nothing):
        with pytest.raises(FileError, match=r"tagged with a\\x1bb"):
            modkit.load_checkpoint(path, location)


def test_functions_that_return_something_else(path):
    """The error of torch is the reason."""
    reason = str(outcome(torch.load, path, to_unknown)[1]).partition("\n")[0]

    with pytest.raises(FileError) as caught:
        modkit.load_checkpoint(path, to_unknown)
    assert str(caught.value).endswith(reason)


@for_each("location", [None, "meta", {"cpu": "cpu"}, nothing], ids=repr)
def test_a_tensor_one_element_beyond_its_storage(location, tmp_path):
    """The view of a storage ends with it, wherever the storage goes."""
    path = tmp_path / "file.pt"
    torch.save({"w": torch.arange(4.0)[1:]}, path)
    members = unpacked(path.read_bytes())
    for member in members:
        # The offset and the size of the view.
        member.data = member.data.replace(b"K\x01K\x03\x85", b"K\x02K\x03\x85")
    path.write_bytes(build(members))

    with pytest.raises(FileError, match="beyond the end of its storage"):
        modkit.load_checkpoint(path, location)


@for_each("name", CALLED)
@for_each("location", ["function", "clone", "function without result"])
def test_calls_of_functions(name, location, tmp_path):
    """A function is called once for each storage, in the order of torch, with the content of the file."""
    path = written(tmp_path, name)
    calls, results = [], []
    for load in (torch.load, modkit.load_checkpoint):
        calls.append(seen := [])

        def function(storage, place, seen=seen):
            seen.append((type(storage), place, storage.device, storage.tolist()))
            return LOCATIONS[location](storage, place)

        with quiet():
            results.append(outcome(load, path, map_location=function))

    (expected, refused), (found, error) = results
    assert calls[0] == calls[1]
    assert (type(error), str(error)) == (type(refused), str(refused))
    if refused is None:
        assert_same(found, expected)


@for_each("name", [name for name in LOCATIONS if name not in {"meta", "meta as a device"}])
def test_one_read(name, path, bytes_read):
    """The file is read once, and verified in the same read."""
    bytes_read.clear()
    modkit.load_checkpoint(path, LOCATIONS[name])
    size = path.stat().st_size
    if name in {"hit", "function to meta"}:
        # Before torch 2.14, tied tensors without an address are read again.
        size += 0 if shares_all_storages else 4 * (300 * 301 + 200_000)

    assert 0.99 * path.stat().st_size < bytes_read["bytes"] < 1.05 * size


@for_each("name", [name for name in LOCATIONS if name not in {"meta", "meta as a device"}])
@for_each("part", ["large", "small"])
@for_each("mmap", [False, True])
def test_corrupt_content(name, part, mmap, path):
    """A flipped bit is an error for each place, and no function sees it."""
    tensor, intact = torch.load(path)[part], path.read_bytes()
    content = bytearray(intact)
    content[content.index(tensor.numpy().tobytes())] ^= 1
    path.write_bytes(content)
    location, seen = LOCATIONS[name], []

    def function(storage, place):
        seen.append(bytes(torch.empty(0, dtype=torch.uint8).set_(storage).numpy()))
        return location(storage, place)

    with pytest.raises(FileError, match="does not match its checksum"):
        modkit.load_checkpoint(path, function if callable(location) else location, mmap=mmap)
    path.write_bytes(intact)
    assert tensor.numpy().tobytes()[1:] not in [each[1:] for each in seen if each]


@for_each("location", ["meta", torch.device("meta")], ids=repr)
@for_each("mmap", [False, True])
def test_meta_tensors_have_no_content(location, mmap, path, bytes_read):
    """The pickle and the small members are read and verified, the content of tensors is not."""
    if not checkpoints.is_meta(location):
        pytest.skip("this torch reads the content")
    content = path.read_bytes()
    corrupt = bytearray(content)
    corrupt[content.index(torch.load(path)["large"].numpy().tobytes())] ^= 1
    path.write_bytes(corrupt)
    bytes_read.clear()

    assert modkit.load_checkpoint(path, location, mmap=mmap)["large"].shape == (300, 301)
    assert bytes_read["bytes"] < 10_000

    corrupt = bytearray(content)
    corrupt[content.index(b"parameter")] ^= 1
    path.write_bytes(corrupt)
    with pytest.raises(FileError, match="does not match its checksum"):
        modkit.load_checkpoint(path, location, mmap=mmap)
    path.write_bytes(content)


@pytest.fixture
def registered():
    """Register a place for tensors, as libraries of other devices do."""
    seen = []

    def restore(storage, location):
        if location == "elsewhere":
            seen.append(storage.nbytes())
            return storage.clone()
        return None

    torch.serialization.register_package(1, lambda storage: None, restore)
    yield seen
    registry = torch.serialization._package_registry
    registry.remove(next(entry for entry in registry if entry[2] is restore))


def test_registered_places(path, registered):
    """The function of a library gets the content."""
    location = {"cpu": "elsewhere"}

    assert_same(modkit.load_checkpoint(path, location), torch.load(path, location))
    assert max(registered) == 800_000


def test_averages_are_made_on_the_cpu(tmp_path, registered):
    """Wherever tensors were saved from, they are read on the CPU."""
    path = tmp_path / "file.pt"
    storage = hostile.storage(location=hostile.text("elsewhere"))
    path.write_bytes(hostile.with_object(hostile.tensor(storage)))

    assert modkit.average_checkpoints([path])["w"].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert registered == []


@pytest.mark.gpu
@for_each("mmap", [False, True])
def test_an_accelerator(mmap, path):
    """Tensors on the device are those of torch."""
    device = torch.accelerator.current_accelerator()
    for location in (device, str(device), f"{device.type}:0", {"cpu": f"{device.type}:0"}):
        found = modkit.load_checkpoint(path, location, mmap=mmap)
        assert_same(found, torch.load(path, location, mmap=mmap))
        assert torch.equal(found["large"].cpu(), torch.load(path)["large"])

    state = {
        name: tensor.to(device) for name, tensor in torch.load(path).items() if name == "large"
    }
    # The cases of a test share their file.
    of_device = path.with_name("device.pt")
    torch.save(state, of_device)
    assert_same(modkit.load_checkpoint(of_device, mmap=mmap), torch.load(of_device, mmap=mmap))


@for_each("mmap", [False, True])
@for_each("map_location", [None, "cpu", "meta"])
def test_empty_tensors_of_one_storage(mmap, map_location, tmp_path) -> None:
    """Mapped ones share a storage, and so the dtype of the first; others are made one by one."""
    first = torch.empty(0)
    storage = first.untyped_storage()
    second = torch.empty(0, dtype=torch.complex64).set_(storage, 0, (2, 0), (1, 1))
    path = tmp_path / "empty.pt"
    torch.save({"first": first, "second": second}, path)
    found = modkit.load_checkpoint(path, map_location, mmap=mmap)
    expected = torch.load(path, map_location, mmap=mmap, weights_only=True)

    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert found[name].device == tensor.device
    ties = [
        pair["first"].untyped_storage()._cdata == pair["second"].untyped_storage()._cdata
        for pair in (found, expected)
    ]
    assert ties[0] == ties[1]
