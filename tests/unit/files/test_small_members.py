import io
import os

import pytest
import torch

import modkit
from modkit import files, jit
from modkit.errors import FileError
from tests.cases import for_each
from tests.integration.torchscript import scripted_tests
from tests.processes import python
from tests.unit.files.raw_zip import replaced, saved
from tests.unit.jit.archives import archive, changed, traced


pytestmark = scripted_tests

# Content that torch never writes; its readers would compute with it.
WRONG = {
    ".storage_alignment": [b"0", b"00", b"-1", b"", b"x", b"\xff", b"6_4", b"9" * 30],
    ".format_version": [b"", b"-1", b"one", b"\xff\n"],
    ".data/version": [b"", b"x", b"-3", b"3" * 5000],
    "version": [b"", b"x", b"-3", b"3" * 5000],
    "byteorder": [b"", b"LITTLE", b"middle", b"\xff"],
    ".data/serialization_id": [b"", b"id", b"\xff" * 40, b"1" * 200],
}
CASES = [(name, content) for name, contents in WRONG.items() for content in contents]


def weights():
    """Return the content of a checkpoint with two storages."""
    return saved({"a": torch.ones(3), "b": torch.ones(4)})


def test_an_alignment_of_zero_does_not_end_the_process(tmp_path):
    """Torch divides by the alignment."""
    path = tmp_path / "last.pt"
    path.write_bytes(replaced(weights(), {".storage_alignment": b"0"}))
    code = f"import modkit\nmodkit.load_checkpoint({os.fspath(path)!r}, 'meta')"
    done = python(code)

    assert done.returncode == 1
    assert "is corrupt: .storage_alignment is b'0', which torch never writes" in done.stderr


@for_each(("name", "content"), CASES)
def test_numbers_in_a_checkpoint(name, content, tmp_path):
    """Every reader refuses content that torch never writes, and names the member."""
    path = tmp_path / "last.pt"
    path.write_bytes(replaced(weights(), {name: content}))
    readers = [
        modkit.load_checkpoint,
        lambda path: modkit.load_checkpoint(path, "meta"),
        lambda path: modkit.load_checkpoint(path, mmap=True),
        lambda path: modkit.average_checkpoints([path]),
        files.inspect,
        files.verify,
    ]

    for reader in readers:
        with pytest.raises(FileError, match=f"{name} is .*, which torch never writes") as caught:
            reader(path)
        assert len(str(caught.value)) < 500


@for_each(("name", "content"), CASES)
def test_numbers_in_a_torchscript_archive(name, content, tmp_path):
    """jit.load and verify refuse them too."""
    path = tmp_path / "net.pt"
    path.write_bytes(changed(archive(), {name: content}))

    for reader in (jit.load, files.verify):
        with pytest.raises(FileError, match=f"{name} is .*, which torch never writes"):
            reader(path)


DEEP = b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b"."


def shaped():
    """Return an archive that keeps the shapes of the inputs that it was traced with."""
    return traced(torch.nn.Linear(2, 2), torch.ones(1, 2)).save_to_buffer()


def test_shapes_are_restored():
    """The inputs of a trace are read if asked for."""
    module = jit.load(io.BytesIO(shaped()), _restore_shapes=True)

    assert module(torch.ones(1, 2)).shape == (1, 2)


def test_every_pickle_that_jit_load_reads_is_checked(tmp_path):
    """C++ reads a deep pickle recursively, which ends the process."""
    names = ["data.pkl", "constants.pkl", "traced_inputs.pkl"]
    names.append("code/__torch__/torch/nn/modules/linear.py.debug_pkl")
    paths = [tmp_path / f"{number}.pt" for number in range(len(names))]
    for path, name in zip(paths, names, strict=True):
        path.write_bytes(changed(shaped(), {name: DEEP}))
    code = """
import sys
from modkit import errors, jit
for path in sys.argv[1:]:
    try:
        jit.load(path, _restore_shapes=True)
    except errors.FileError as error:
        print(error)
"""
    done = python(code, *paths)

    assert done.returncode == 0, done.stderr
    assert done.stdout.count("nests deeper than 1,000 levels") == len(names)
