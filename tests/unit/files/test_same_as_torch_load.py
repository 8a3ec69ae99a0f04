import contextlib
from pathlib import Path

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from modkit import load_checkpoint
from modkit._upstream import sparse_tensors_to_check
from modkit.errors import FileError
from tests.cases import for_each
from tests.unit.files.checkpoint_zoo import (
    CONTENTS,
    WAYS,
    Marked,
    file_of,
    file_written,
    quiet,
)
from tests.unit.files.same_objects import assert_same, outcome


FILES = [*CONTENTS, *WAYS]
# Files that are read with a warning.
UNVERIFIED = {"legacy", "no checksums"}
# Torch reverses bytes of storages without memory, and the process dies.
CRASHES = {"big endian"}
# Files whose tensors were on a device that is not there.
ELSEWHERE = {"cuda", "unknown location"}
# torch computes where storages without memory are in a file, which is wrong in files that were rewritten.
REWRITTEN = {"alignment 1", "no descriptors", "reversed"}
# Classes that the user must allow-list before torch reads these.
PERMISSIONS = {
    "subclasses": [Marked],
    "numpy values": [
        np.dtype,
        np.dtypes.Float64DType,
        (np._core.multiarray.scalar, "numpy.core.multiarray.scalar"),
        (np._core.multiarray.scalar, "numpy._core.multiarray.scalar"),
    ],
}
# Modkit reads these without a permission; torch, which is the oracle, needs one.
READ_BY_MODKIT = [bytes, *PERMISSIONS["numpy values"]]


def written(folder: Path, name: str) -> Path:
    """Write the file of this name."""
    path = folder / "file.pt"
    path.write_bytes(file_of(name) if name in CONTENTS else file_written(name))
    return path


def assert_as_torch(path: Path, name: str = "", *, within=contextlib.nullcontext, **options):
    """Read a file with both libraries, and compare the objects, or see both refuse it."""
    with quiet(), within():
        with torch.serialization.safe_globals(READ_BY_MODKIT):
            expected, refused = outcome(torch.load, path, weights_only=True, **options)
        # Since 2.14, torch refuses the next file for the sparse tensors of one that it has refused.
        sparse_tensors_to_check().clear()
        if refused is None and name in UNVERIFIED:
            with pytest.warns(UserWarning, match=r"has no checksums.*`modkit convert`"):
                found = load_checkpoint(path, **options)
        elif refused is None:
            found = load_checkpoint(path, **options)
        elif (
            name == "sparse"
            and options.get("map_location")
            and type(refused) is NotImplementedError
        ):
            # Torch 2.15 reads the indices to check them, which have no values on the meta device.
            assert {each.device.type for each in load_checkpoint(path, **options).values()} == {
                "meta"
            }
            return
        elif name in ELSEWHERE and options.get("map_location") is not None:
            # The caller chooses the device, so the error is torch's own.
            error = outcome(load_checkpoint, path, **options)[1]
            assert (type(error), str(error)) == (type(refused), str(refused))
            return
        else:
            with pytest.raises(FileError, match=r"file\.pt ") as caught:
                load_checkpoint(path, **options)
            assert str(path) in str(caught.value)
            assert str(caught.value).isprintable()
            return
    with quiet():
        places = name not in REWRITTEN or options.get("map_location") != "meta"
        values = within != torch.serialization.skip_data
        assert_same(found, expected, values=values, places=places)


@for_each("name", FILES)
@for_each("mmap", [False, True])
def test_objects(name, mmap, tmp_path):
    """Each file is read, and mapped, as the same objects as torch makes of it, or refused."""
    assert_as_torch(written(tmp_path, name), name, **({"mmap": True} if mmap else {}))


@for_each("name", FILES)
@for_each(
    "location", ["cpu", torch.device("cpu"), "meta", {"cuda:0": "cpu"}, {"cpu": "meta"}], ids=repr
)
def test_map_location(name, location, tmp_path):
    """Tensors go to a device, or to those that a table names."""
    if name in CRASHES and location == "meta":
        pytest.skip("torch crashes")
    path = written(tmp_path, name)
    assert_as_torch(path, name, map_location=location)
    if location == "meta":
        # Storages on no device remember where they are in the file.
        assert_as_torch(path, name, map_location=location, mmap=True)


SURROUNDINGS = {
    "device meta": lambda: torch.device("meta"),
    "device cpu": lambda: torch.device("cpu"),
    "default dtype": lambda: default_dtype(torch.float64),
    "inference mode": torch.inference_mode,
    "no grad": torch.no_grad,
    "fake tensors": FakeTensorMode,
    "skipped data": torch.serialization.skip_data,
    "big endian": lambda: endianness(torch.serialization.LoadEndianness.BIG),
}


@contextlib.contextmanager
def default_dtype(dtype):
    """Make tensors of another dtype by default."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def endianness(order):
    """Read files without a byte order as files of a machine with this one."""
    before = torch.serialization.get_default_load_endianness()
    torch.serialization.set_default_load_endianness(order)
    try:
        yield
    finally:
        torch.serialization.set_default_load_endianness(before)


@for_each("surroundings", SURROUNDINGS)
@for_each(
    "name",
    [
        *("plain", "ties", "views", "modules", "parameters", "shapes", "sparse", "quantized"),
        *("storages", "attributes", "meta", "big endian", "no byte order", "alignment 1", "nested"),
    ],
)
@for_each("mmap", [False, True])
def test_surroundings(surroundings, name, mmap, tmp_path):
    """Modes of torch around the call have the same effect."""
    if name in CRASHES and surroundings == "fake tensors":
        pytest.skip("torch crashes")
    if name in {"nested", "sparse"} and surroundings == "skipped data":
        pytest.skip("torch takes uninitialized memory for indices")
    path = written(tmp_path, name)
    options = {"mmap": True} if mmap else {}
    assert_as_torch(path, name, within=SURROUNDINGS[surroundings], **options)


@for_each("name", PERMISSIONS)
@for_each("mmap", [False, True])
def test_permissions(name, mmap, tmp_path):
    """Classes that the user has allowed torch to load are loaded."""
    path = written(tmp_path, name)
    options = {"mmap": True} if mmap else {}
    if name != "numpy values":
        with pytest.raises(FileError, match="cannot be read as a checkpoint"):
            load_checkpoint(path, **options)
    with torch.serialization.safe_globals(PERMISSIONS[name]), quiet():
        assert_same(
            load_checkpoint(path, **options), torch.load(path, weights_only=True, **options)
        )


@pytest.mark.parametrize("mmap", [False, True])
def test_writing_to_tensors(mmap, tmp_path):
    """Tensors can be written to, resized as torch's can, and the file stays as it was."""
    path = written(tmp_path, "plain")
    before = path.read_bytes()
    options = {"mmap": True} if mmap else {}
    both = [load_checkpoint(path, **options), torch.load(path, weights_only=True, **options)]
    for found in both:
        found["part"].add_(1)
        found["tied"].resize_(2)
        found["n"].fill_(3)
    assert_same(*both)
    assert path.read_bytes() == before


def test_training_on_tensors(tmp_path):
    """Gradients flow to what was loaded, and to the same tensors."""
    path = written(tmp_path, "parameters")
    grads = []
    for load in (torch.load, load_checkpoint):
        found = load(path)
        (found["parameter"] * 2 + found["requires grad"]).sum().backward()
        grads.append({name: getattr(value, "grad", None) for name, value in found.items()})
    assert_same(*grads)


def test_permissions_for_replacements(tmp_path):
    """A class that the user allows under the name of another one is the one that is used."""
    path = tmp_path / "file.pt"
    path.write_bytes(file_of("subclasses"))
    with torch.serialization.safe_globals([(torch.Tensor, f"{Marked.__module__}.Marked")]):
        assert_same(load_checkpoint(path), torch.load(path, weights_only=True))


def test_a_file_after_a_refused_one(tmp_path):
    """The sparse tensors of a file that is refused are not checked with those of the next one."""
    # Before release 2.14, torch checks them only where the user asks for it.
    beyond = torch.sparse_coo_tensor([[5]], [1.0], (2,), check_invariants=False)
    torch.save({"beyond": beyond, "refused": print}, tmp_path / "first.pt")
    torch.save({"sparse": torch.eye(2).to_sparse()}, tmp_path / "next.pt")

    with torch.sparse.check_sparse_tensor_invariants(), quiet():
        with pytest.raises(FileError, match="needs print"):
            load_checkpoint(tmp_path / "first.pt")
        found = load_checkpoint(tmp_path / "next.pt")

    assert torch.equal(found["sparse"].to_dense(), torch.eye(2))
