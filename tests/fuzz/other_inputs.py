"""Hostile input beside single files: shards and indices, states of averages, snapshots, commands."""

from __future__ import annotations

import copy
import io
import json
import math
import random
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import click.testing
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save

import modkit
from modkit import files, migrations
from modkit.averaging.posthoc import reconstruct, save_snapshot
from modkit.cli._commands import commands
from modkit.distributed import load_averages
from modkit.errors import FileError
from modkit.files.safetensors_files import save_safetensors
from tests.unit.files.raw_zip import saved


Dice = random.Random
Hurt = Callable[[Dice, bytes], bytes]
LONGEST = 2000
VALUES: list[Callable[[], Any]] = [
    *(lambda v=v: v for v in (None, True, 0, -1, 3, 2**31, 2**63, 10**400, 0.5, -0.0, 1e308)),
    *(lambda v=v: v for v in (math.inf, -math.inf, math.nan, "", "1", "x" * 70_000, b"ab")),
    *(lambda v=v: v for v in ("\x1b[31m\x07\n", "\u202e", (1, 2), 1j)),
    list,
    dict,
    lambda: {"a": {"b": [1]}},
    lambda: torch.ones(2, 2),
    lambda: torch.tensor(3),
    lambda: torch.ones(0),
    lambda: torch.full((2, 2), math.nan),
    lambda: torch.ones(2, 2, dtype=torch.complex64),
    lambda: torch.ones(2, 2, dtype=torch.int8),
    lambda: torch.ones(2, 2).to_sparse(),
    lambda: torch.ones(2, 2, device="meta"),
    lambda: torch.ones(1).expand(2, 2),
    lambda: torch.quantize_per_tensor(torch.ones(2, 2), 0.1, 0, torch.qint8),
    lambda: torch.ones(2, 2, requires_grad=True),
]
NAMES: list[Any] = ["", "x", "weight", "0.weight", "\x1b[31m", "x" * 70_000, 5, None, (1, 2), b"a"]
SHARDS = ["", ".", "..", "../a.bin", "/dev/null", "missing.bin", "\x1b[31m.bin", "a\0b", "x" * 5000]


class Surprise(Exception):
    """A fault that is not an exception."""


def changed(dice: Dice, content: Any) -> Any:
    """Return a copy of nested containers with one to three entries changed."""
    content = copy.deepcopy(content)
    for _ in range(dice.choice([1, 1, 2, 3])):
        holder = content
        while True:
            inner = list(holder.values()) if isinstance(holder, dict) else list(holder)
            deeper = [each for each in inner if isinstance(each, (dict, list)) and each]
            if not deeper or dice.random() < 0.3:
                break
            holder = dice.choice(deeper)
        change_one(dice, holder)
    return content


def change_one(dice: Dice, holder: Any) -> None:
    """Change one entry of a dict or a list."""
    keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
    what = dice.randrange(6)
    if what == 0 and keys:
        del holder[dice.choice(keys)]
    elif what == 1 and isinstance(holder, dict):
        holder[dice.choice(NAMES)] = dice.choice(VALUES)()
    elif what == 2 and isinstance(holder, dict) and keys:
        holder[dice.choice(NAMES)] = holder.pop(dice.choice(keys))
    elif keys:
        holder[dice.choice(keys)] = dice.choice(VALUES)()


def model() -> torch.nn.Module:
    """Return a small model with parameters and buffers."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))


def same(found: Mapping[str, Any], expected: Mapping[str, Any]) -> bool:
    """Return True if two states have the same values, bit by bit."""
    one, other = io.BytesIO(), io.BytesIO()
    torch.save(dict(found), one)
    torch.save(dict(expected), other)
    return one.getvalue() == other.getvalue()


def check_unchanged(before: Any, after: Any) -> None:
    """Raise if an object that refused a state has changed."""
    if not same(before, after):
        raise Surprise("the state was refused, and something has changed")


def load_changed(dice: Dice, averages: Any) -> None:
    """Load a changed state into averages after an update."""
    averages.update()
    state = changed(dice, averages.state_dict())
    before = copy.deepcopy(averages.state_dict())
    try:
        averages.load_state_dict(state)
    except Exception:
        check_unchanged(before, averages.state_dict())
        raise


def state_of_ema(dice: Dice, folder: Path, hurt: Hurt) -> None:
    """Load a changed state into averages; a refused state changes nothing."""
    decay: Any = dice.choice([0.9, modkit.schedules.InverseGamma()])
    ema = modkit.EMA(model(), decay=decay)
    load_changed(dice, ema)


def state_of_posthoc(dice: Dice, folder: Path, hurt: Hurt) -> None:
    """Load a changed state into power averages; a refused state changes nothing."""
    averages = modkit.PostHocEMA(model(), folder / "snapshots")
    load_changed(dice, averages)


def snapshots(dice: Dice, folder: Path, hurt: Hurt) -> None:
    """Combine snapshots, one of them changed or corrupt."""
    for step in (5, 10):
        for sigma_rel in (0.05, 0.1):
            save_snapshot(folder, {"w": torch.ones(2, 2)}, step=step, sigma_rel=sigma_rel)
    path = dice.choice(sorted(folder.glob("*.pt")))
    if dice.random() < 0.3:
        path.write_bytes(hurt(dice, path.read_bytes()))
    else:
        path.write_bytes(saved(changed(dice, torch.load(path, weights_only=True))))
    reconstruct(folder, 0.08, max_error=9)


def distributed(dice: Dice, folder: Path, hurt: Hurt) -> None:
    """Load a changed checkpoint of torch.distributed; a refused one changes nothing."""
    ema = modkit.EMA(model(), decay=0.9)
    ema.update()
    state = ema.state_dict()
    is_changed = dice.random() < 0.5
    try:
        save({"ema": changed(dice, state) if is_changed else state}, checkpoint_id=folder)
    except Exception:
        # torch cannot write each of these.
        return
    if not is_changed:
        path = dice.choice(sorted(folder.glob("*.distcp")))
        path.write_bytes(hurt(dice, path.read_bytes()))
    before = copy.deepcopy(ema.state_dict())
    try:
        load_averages(ema, folder)
    except Exception:
        if is_changed:
            check_unchanged(before, ema.state_dict())
        raise


def shards(dice: Dice, folder: Path, hurt: Hurt) -> None:
    """Average and inspect shards whose index, or whose files, do not fit."""
    end = dice.choice(["bin", "safetensors"])
    tensors = {name: torch.arange(4.0) + at for at, name in enumerate(["a", "b", "c"])}
    paths = {"a": f"one.{end}", "b": f"one.{end}", "c": f"two.{end}"}
    for file in set(paths.values()):
        content = {name: tensors[name] for name in paths if paths[name] == file}
        if end == "bin":
            torch.save(content, folder / file)
        else:
            save_safetensors(content, folder / file)
    index: Any = {"metadata": {"total_size": 48}, "weight_map": dict(paths)}
    what = dice.randrange(4)
    if what == 0:
        listed = index["weight_map"]
        listed[dice.choice(["a", "b", "c", "d", "\x1b[31m", "x" * 70_000])] = dice.choice(
            [*SHARDS, *paths.values(), 3, None, ["one"]]
        )
    elif what == 1:
        index = json.loads(json.dumps(changed(dice, index), default=str, skipkeys=True))
    written = json.dumps(index).encode()
    if what == 2:
        written = hurt(dice, written)
    if what == 3:
        shard = folder / dice.choice(sorted(paths.values()))
        shard.write_bytes(hurt(dice, shard.read_bytes()))
    name = "pytorch_model.bin" if end == "bin" else "model.safetensors"
    path = folder / f"{name}.index.json"
    path.write_bytes(written)
    files.inspect(path)
    found = modkit.average_checkpoints([path])
    # safetensors has no checksums.
    for name, tensor in found.items():
        intact = name in tensors and torch.equal(tensor, tensors[name])
        if not intact and not (what == 3 and end == "safetensors"):
            raise Surprise(f"{name[:100]!r} is {tensor}")


@migrations.declare({2: [migrations.rename("**.w", "**.v"), migrations.rename("w", "v")]})
class Net(torch.nn.Module):
    """A model whose checkpoints are migrated."""

    def __init__(self) -> None:
        """Make it."""
        super().__init__()
        self.v = torch.nn.Parameter(torch.ones(4))


MODEL = ["--model", f"{__name__}:Net"]


def command_line(dice: Dice, folder: Path, hurt: Hurt) -> None:
    """Run commands on corrupt files; they print lines and return 0, 1 or 2."""
    data = saved({"w": torch.arange(4.0), "name": "x"})
    suffix = dice.choice([".pt", ".safetensors", ".bin.index.json", ""])
    path = folder / f"file{suffix}"
    if suffix == ".safetensors":
        save_safetensors({"w": torch.ones(3), "\x1b[31m": torch.ones(1)}, path)
        data = path.read_bytes()
    path.write_bytes(hurt(dice, data) if dice.random() < 0.8 else saved({dice.choice(NAMES): 1}))
    other = folder / "other.pt"
    other.write_bytes(saved({"w": torch.ones(4)}))
    line = dice.choice(
        [
            ["inspect", str(path)],
            ["verify", str(path)],
            ["verify", str(path), "--write-sha256sums", str(folder / "sums")],
            ["convert", str(path), "-o", str(folder / "out.safetensors")],
            ["convert", str(path), "-o", str(folder / "out.pt"), "--key", "w"],
            ["migrate", str(path), "-o", str(folder / "out.safetensors"), *MODEL],
            ["migrate", "--dry-run", "--json", str(path), "--key", "w", *MODEL],
            ["inspect", "--json", str(path)],
            ["average", str(path), str(other), "-o", str(folder / "out.pt")],
            ["average", str(path), "-o", str(folder / "out.safetensors")],
            ["diff", str(path), str(other)],
            ["diff", str(other), str(path), "--values"],
            ["diff", str(path), str(path), "--values", "--json"],
        ]
    )
    done = click.testing.CliRunner().invoke(commands, line)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    if done.exit_code not in {0, 1, 2}:
        raise Surprise(f"{line} returned {done.exit_code}")
    is_diff = line[0] == "diff" and done.exit_code == 1
    if is_diff and not done.stdout:
        raise Surprise(f"{line} returned 1 and showed no difference")
    if not all(c.isprintable() or c == "\n" for c in done.output):
        raise Surprise(f"{line} printed control characters: {done.output!r:.500}")
    if done.exit_code and len(done.stderr) > LONGEST + 200:
        raise Surprise(f"{line} printed {len(done.stderr)} characters")


Act = Callable[[Dice, Path, Hurt], None]
Documented = tuple[type[Exception], ...]
# By name: what to do, and the exceptions that the documentation names.
INPUTS: dict[str, tuple[Act, Documented]] = {
    "state of EMA": (state_of_ema, (ValueError,)),
    "state of PostHocEMA": (state_of_posthoc, (ValueError,)),
    "snapshots": (snapshots, (FileError, ValueError, FileNotFoundError)),
    "load_averages": (
        distributed,
        (ValueError, FileNotFoundError, cast("Any", CheckpointException)),
    ),
    "shards": (shards, (FileError, ValueError, OSError)),
    "commands": (command_line, ()),
}


def outcome_of_input(name: str, dice: Dice, folder: Path, hurt: Hurt) -> tuple[str, str]:
    """Return the outcome of one input, and a text if it is an error."""
    act, documented = INPUTS[name]
    folder.mkdir()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            act(dice, folder, hurt)
    except documented as error:
        # That of torch has the traceback of each rank.
        if isinstance(error, CheckpointException):
            return "CheckpointException", ""
        text = str(error)
        unreadable = not all(c.isprintable() or c == "\n" for c in text)
        if unreadable or len(text) > LONGEST + 200:
            return "bad text", f"{type(error).__name__} of {len(text)} characters: {text!r:.2000}"
        return type(error).__name__, ""
    except Surprise as error:
        return "read otherwise", str(error)
    return "read", ""
