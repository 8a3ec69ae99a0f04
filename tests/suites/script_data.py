"""Small random data in the formats that public training scripts read."""

import pickle
import struct
from pathlib import Path

import numpy as np
from PIL import Image


def _random() -> np.random.Generator:
    return np.random.default_rng(0)


def tokens(folder: Path) -> None:
    """Write token files as the preparation scripts of nanoGPT do."""
    data = folder / "data" / "shakespeare_char"
    data.mkdir(parents=True, exist_ok=True)
    for name in ("train", "val"):
        _random().integers(0, 65, 20_000).astype(np.uint16).tofile(data / f"{name}.bin")
    (data / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 65}))


def words(folder: Path) -> None:
    """Write the three files of a corpus of text."""
    data = folder / "data" / "wikitext-2"
    data.mkdir(parents=True, exist_ok=True)
    for name, lines in (("train", 400), ("valid", 60), ("test", 60)):
        numbers = _random().integers(0, 200, (lines, 12))
        text = "\n".join(" ".join(f"word{number}" for number in line) for line in numbers)
        (data / f"{name}.txt").write_text(f"{text}\n", encoding="utf-8")


def citations(folder: Path) -> None:
    """Write a graph in the format of Cora: nodes with features and a class, and edges."""
    data = folder.parent / "data" / "cora"
    data.mkdir(parents=True, exist_ok=True)
    random = _random()
    features = random.integers(0, 2, (1600, 24))
    lines = [
        f"{node} {' '.join(map(str, row))} class{node % 7}" for node, row in enumerate(features)
    ]
    (data / "cora.content").write_text("\n".join(lines), encoding="utf-8")
    edges = [f"{first} {second}" for first, second in random.integers(0, 1600, (5000, 2))]
    (data / "cora.cites").write_text("\n".join(edges), encoding="utf-8")


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


def boxes(folder: Path) -> None:
    """Write pictures with labelled boxes in the format of YOLO, and the file that describes them."""
    random = _random()
    for part in ("images", "labels"):
        (folder / "boxes" / part).mkdir(parents=True, exist_ok=True)
    for index in range(16):
        pixels = random.integers(0, 256, (64, 64, 3)).astype(np.uint8)
        Image.fromarray(pixels).save(folder / "boxes" / "images" / f"{index}.png")
        lines = [
            f"{random.integers(0, 3)} {x:.3f} {y:.3f} 0.3 0.3"
            for x, y in random.uniform(0.2, 0.8, (3, 2))
        ]
        label = folder / "boxes" / "labels" / f"{index}.txt"
        label.write_text("\n".join(lines), encoding="utf-8")
    described = f"path: {folder / 'boxes'}\ntrain: images\nval: images\nnames: [a, b, c]\n"
    (folder / "boxes.yaml").write_text(described, encoding="utf-8")
    # The script downloads a font unless it is there, and without plots does not read it.
    (folder / "Arial.ttf").touch()
