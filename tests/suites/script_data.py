"""Small random data in the formats that public training scripts read."""

import pickle
import struct
from pathlib import Path

import numpy as np


def _random() -> np.random.Generator:
    return np.random.default_rng(0)


def tokens(folder: Path) -> None:
    """Write token files as the preparation scripts of nanoGPT do."""
    data = folder / "data" / "shakespeare_char"
    data.mkdir(parents=True, exist_ok=True)
    for name in ("train", "val"):
        _random().integers(0, 65, 20_000).astype(np.uint16).tofile(data / f"{name}.bin")
    (data / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 65}))


def _digits(raw: Path, train: int, test: int) -> None:
    raw.mkdir(parents=True, exist_ok=True)
    for name, count in (("train", train), ("t10k", test)):
        images = _random().integers(0, 256, (count, 28, 28)).astype(np.uint8)
        header = struct.pack(">IIII", 0x803, count, 28, 28)
        (raw / f"{name}-images-idx3-ubyte").write_bytes(header + images.tobytes())
        labels = _random().integers(0, 10, count).astype(np.uint8)
        header = struct.pack(">II", 0x801, count)
        (raw / f"{name}-labels-idx1-ubyte").write_bytes(header + labels.tobytes())


def digits(folder: Path) -> None:
    """Write images in the format of MNIST, beside the folder of the script."""
    _digits(folder.parent / "data" / "MNIST" / "raw", 640, 256)


def all_digits(folder: Path) -> None:
    """Write as many images as MNIST has, which the examples of Lightning split."""
    _digits(folder / "data" / "MNIST" / "raw", 60_000, 256)
