"""Readers and writers of files: modkit, which verifies checksums, compared with torch and safetensors, which do not.

``zlib`` is modkit without the package zlib-ng. The file is in the page cache.
"""

import ctypes
import os
import time
import zlib
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final
from unittest import mock

import torch
from torch import Tensor

import modkit
import modkit.jit
from benchmarks.measure import Arm, Arms, Code, Row
from modkit.files import zip_archive


Call = Callable[..., Any]
SMALL: Final = "5,460 tensors"
MEDIUM: Final = "100 x 4 MB"
LARGE: Final = "1 GB"
# Each takes the share of the size that tests use.
CONTENTS: Final[dict[str, Callable[[float], dict[str, Tensor]]]] = {
    SMALL: lambda n: {f"layers.{i}.weight": torch.zeros(8, 8) for i in range(int(5460 * n))},
    MEDIUM: lambda n: {f"layers.{i}.weight": torch.rand(int(n * 2**20)) for i in range(100)},
    LARGE: lambda n: {"weight": torch.rand(int(n * 2**28))},
}


def without_zlib_ng(call: Call) -> Call:
    """Return a function that computes checksums with Python's zlib."""

    def called(*args: Any, **options: Any) -> Any:
        with mock.patch.object(zip_archive, "crc32", zlib.crc32):
            return call(*args, **options)

    return called


def save_and_sync(content: dict[str, Tensor], path: Path) -> None:
    """Save as ``torch.save`` does, and wait until the disk has the file."""
    torch.save(content, path)
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def timed(calls: Mapping[str, Call | str]) -> Arms:
    """Time calls by the clock, because modkit verifies in threads."""
    return {
        name: call if isinstance(call, str) else Code("read = f()", {"f": call}, time.perf_counter)
        for name, call in calls.items()
    }


def safetensors(name: str) -> Any:
    """Return a function of safetensors, or None if it is not installed."""
    try:
        return getattr(import_module("safetensors.torch"), name)
    except ImportError:
        return None


def reading(
    stack: ExitStack, content: str, share: float = 1.0, *, eager: bool = False, **options: Any
) -> Arms:
    """Read a checkpoint with the same options; with ``eager``, torch has none."""
    folder = Path(stack.enter_context(TemporaryDirectory()))
    path, safe_path = folder / "a.pt", folder / "a.safetensors"
    tensors = CONTENTS[content](share)
    torch.save(tensors, path)
    if save_file := safetensors("save_file"):
        save_file(tensors, safe_path)
    device = options.get("map_location")
    is_plain = device is None or device == "cpu"
    load_file = safetensors("load_file")
    return timed(
        {
            "torch": partial(torch.load, path, weights_only=True, **({} if eager else options)),
            "modkit": partial(modkit.load_checkpoint, path, **options),
            "zlib": without_zlib_ng(partial(modkit.load_checkpoint, path, **options)),
            "safetensors": partial(load_file, safe_path) if load_file and is_plain else "",
        }
    )


def writing(stack: ExitStack, content: str, share: float = 1.0) -> Arms:
    """Write a checkpoint, with fsync."""
    folder = Path(stack.enter_context(TemporaryDirectory()))
    tensors = CONTENTS[content](share)
    save_file = safetensors("save_file")
    return timed(
        {
            "torch": partial(save_and_sync, tensors, folder / "a.pt"),
            "modkit": partial(modkit.save_checkpoint, tensors, folder / "b.pt"),
            "safetensors": partial(save_file, tensors, folder / "c") if save_file else "",
        }
    )


def archive(stack: ExitStack, share: float = 1.0, *, reused: bool) -> Arms:
    """Time the readers of a compiled model of 200 MB, in fresh or in reused memory."""
    path = Path(stack.enter_context(TemporaryDirectory())) / "archive.pt"
    linears = (torch.nn.Linear(1024, int(1024 * share)) for _ in range(50))
    torch.jit.save(torch.jit.script(torch.nn.Sequential(*linears)), path)
    give_back = getattr(ctypes.CDLL(None), "malloc_trim", lambda _: None)
    pins: list[object] = []
    for _ in range(3 * reused):
        loaded = torch.jit.load(path)
        # Allocated behind the model, so that the memory of the model stays with the process.
        pins.append((torch.zeros(900_000), loaded)[0])

    def arm(load: Call, number: int) -> float:
        seconds = 0.0
        for _ in range(number):
            if not pins:
                give_back(0)
            start = time.perf_counter()
            read = load(path)
            seconds += time.perf_counter() - start
            del read
        return seconds

    loads: dict[str, Call] = {"torch": torch.jit.load, "modkit": modkit.jit.load}
    loads["zlib"] = without_zlib_ng(modkit.jit.load)
    arms: dict[str, Arm] = {name: partial(arm, load) for name, load in loads.items()}
    return arms


def _read(name: str, budget: float, content: str, **options: Any) -> Row:
    return Row(name, budget, partial(reading, content=content, **options), table="files")


def on_device() -> list[Row]:
    """Return the rows of the accelerator, if there is one."""
    if not torch.accelerator.is_available():
        return []
    device = torch.accelerator.current_accelerator()
    return [
        _read(f"load_checkpoint() to {device}, {content}", 1.15, content, map_location=device)
        for content in (MEDIUM, LARGE)
    ]


def keep(storage: Any, location: str) -> Any:
    """Leave a storage where it is."""
    return storage


ROWS: Final = [
    _read(f"load_checkpoint(), {SMALL}", 0.35, SMALL),
    _read(f"load_checkpoint(), {MEDIUM}", 1.15, MEDIUM),
    _read(f"load_checkpoint(), {LARGE}", 1.10, LARGE),
    _read(f"load_checkpoint('cpu'), {MEDIUM}", 1.15, MEDIUM, map_location="cpu"),
    _read(f"load_checkpoint('meta'), {SMALL}", 1.15, SMALL, map_location="meta"),
    _read(f"load_checkpoint(function), {MEDIUM}", 1.15, MEDIUM, map_location=keep),
    *on_device(),
    _read(
        f"load_checkpoint(mmap=True) / eager torch.load(), {LARGE}",
        *(0.3, LARGE),
        eager=True,
        mmap=True,
    ),
    Row("jit.load(), 200 MB", 1.25, partial(archive, reused=False), table="files"),
    Row("jit.load(), 200 MB in reused memory", 1.25, partial(archive, reused=True), table="files"),
    Row(
        f"save_checkpoint() / torch.save() and fsync, {MEDIUM}",
        *(1.10, partial(writing, content=MEDIUM)),
        table="files",
    ),
]
