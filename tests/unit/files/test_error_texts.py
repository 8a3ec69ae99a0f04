"""Names in a file may move the cursor of a terminal, and have any length."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import modkit
from modkit import files, jit
from modkit.averaging.posthoc import reconstruct, save_snapshot
from modkit.errors import FileError, NameMismatchError, shown
from modkit.files.safetensors_files import save_safetensors
from tests.cases import for_each
from tests.integration.torchscript import scripted_tests
from tests.unit.files.hostile_files import added
from tests.unit.files.raw_zip import saved


pytestmark = scripted_tests

LONGEST = 2000
ONE = torch.ones(1)
NAMES = {"escapes": "\x1b[31mred\x07\n", "long": "a" * 70_000}


def missing_shard(folder: Path, name: str) -> None:
    """Average an index that lists a file that does not exist."""
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"weight": name}}))
    modkit.average_checkpoints([index])


def missing_tensor(folder: Path, name: str) -> None:
    """Inspect an index that lists a tensor that its shard does not have."""
    torch.save({"weight": torch.ones(1)}, folder / "shard.bin")
    index = folder / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": {name: "shard.bin"}}))
    files.inspect(index)


def member(folder: Path, name: str) -> None:
    """Load a file with a member that is compressed."""
    full_name = f"FOLDER/{name[:60_000]}".encode()
    (folder / "x.pt").write_bytes(added(saved({"w": torch.ones(1)}), full_name, method=8))
    modkit.load_checkpoint(folder / "x.pt")


def averages(folder: Path, *states: dict[str, Any], **options: Any) -> None:
    """Average files with these states."""
    paths = [folder / f"{index}.pt" for index in range(len(states))]
    for path, state in zip(paths, states, strict=True):
        torch.save(state, path)
    modkit.average_checkpoints(paths, **options)


def snapshots(folder: Path, name: str) -> None:
    """Combine snapshots of different models."""
    for step, key in ((5, "weight"), (10, name)):
        save_snapshot(folder, {key: torch.ones(1)}, step=step, sigma_rel=0.1)
    reconstruct(folder, 0.15, max_error=9)


def extra_file(folder: Path, name: str) -> None:
    """Ask for an extra file that an archive does not have."""
    buffer = io.BytesIO()
    files_in_it = {name[:60_000]: "text"}
    jit.save(jit.script(torch.nn.ReLU()), buffer, _extra_files=files_in_it)
    buffer.seek(0)
    jit.load(buffer, _extra_files={"labels": ""}, strict_extra_files=True)


def state_of_ema(folder: Path, name: str) -> None:
    """Load a state with another entry."""
    ema = modkit.EMA(torch.nn.Linear(1, 1))
    ema.load_state_dict(
        {"averaging_state": {"n_averaged": 1}, "state_dict": {name: ONE.to_sparse()}}
    )


CASES: dict[str, tuple[Callable[[Path, str], None], type[Exception]]] = {
    "missing shard": (missing_shard, FileNotFoundError),
    "missing tensor": (missing_tensor, FileError),
    "member": (member, FileError),
    "names": (lambda p, n: averages(p, {n: ONE}, {"weight": ONE}), NameMismatchError),
    "dtypes": (lambda p, n: averages(p, {n: ONE}, {n: ONE.int()}), ValueError),
    "entry": (lambda p, n: averages(p, {n: 3}), FileError),
    "value": (lambda p, n: averages(p, {n: ONE * 1e9}, dtype=torch.float16), ValueError),
    "safetensors": (
        lambda p, n: save_safetensors({n: torch.ones(1, dtype=torch.complex128)}, p / "x"),
        ValueError,
    ),
    "snapshots": (snapshots, ValueError),
    "extra file": (extra_file, KeyError),
    "state": (state_of_ema, ValueError),
}


@for_each("kind", NAMES)
@for_each("case", CASES)
def test_exceptions_that_quote_a_file(case: str, kind: str, tmp_path: Path) -> None:
    """Their texts are printable and short, and begin and end with what the library says."""
    fail, error = CASES[case]
    with pytest.raises(error) as caught:
        fail(tmp_path, NAMES[kind])

    text = str(caught.value.args[0])
    assert text.isprintable()
    assert len(text) <= LONGEST
    assert ("characters) ... " in text) == (kind == "long")


def test_a_short_text_stays_as_it_is() -> None:
    """Only what is too long is cut, in the middle."""
    assert shown("x" * LONGEST) == "x" * LONGEST
    assert len(shown("x" * (LONGEST + 1))) < LONGEST
    assert shown(f"begin{'x' * 9000}end").startswith("begin")
    assert shown(f"begin{'x' * 9000}end").endswith("end")
