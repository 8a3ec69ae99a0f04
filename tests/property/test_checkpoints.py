"""``load_checkpoint`` beside ``torch.load``, and ``average_checkpoints`` beside means in float64, on random files."""

import json
import math
import tempfile
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor, nn

import modkit
from modkit import load_checkpoint
from modkit.errors import FileError
from tests.cases import for_each
from tests.helpers import freeze
from tests.unit.files.checkpoint_zoo import DTYPES, filled, quiet
from tests.unit.files.same_objects import assert_same, outcome
from tests.unit.files.writers import installed


NAMES = st.one_of(st.text(max_size=8), st.sampled_from(["weight", "bias", "0", "a.b", "\ud800"]))
VALUES = st.one_of(
    *(st.none(), st.booleans(), st.integers(), st.floats(), st.complex_numbers(), NAMES),
    *(st.binary(max_size=5), st.sampled_from(DTYPES), st.just(torch.device("cpu"))),
)


@st.composite
def storages(draw: Any) -> list[Tensor]:
    """Draw flat tensors of all dtypes; views share them."""
    dtypes = draw(st.lists(st.sampled_from(DTYPES), min_size=1, max_size=4))
    return [filled(dtype, draw(st.sampled_from([0, 1, 6, 24]))) for dtype in dtypes]


@st.composite
def views(draw: Any, bases: list[Tensor]) -> Tensor:
    found = draw(st.sampled_from(bases))
    count = found.numel()
    kind = draw(st.sampled_from(["base", "slice", "strided", "scalar", "expanded", "parameter"]))
    if kind == "slice":
        start = draw(st.integers(0, count))
        found = found[start : draw(st.integers(start, count))]
    elif kind == "strided" and count >= 6:
        sizes = draw(st.sampled_from([(2, 3), (3, 2), (1, 6), (2, 0), (2, 1, 2)]))
        strides = tuple(draw(st.integers(0, 2)) for _ in sizes)
        offset = draw(st.integers(0, 1))
        last = sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
        if offset + last < count:
            found = found.as_strided(sizes, strides, offset)
    elif kind == "scalar" and count:
        found = found[draw(st.integers(0, count - 1))]
    elif kind == "expanded" and count:
        found = found[:1].expand(draw(st.integers(0, 3)), 1)
    floating = found.is_floating_point() or found.is_complex()
    if kind == "parameter":
        return nn.Parameter(found, requires_grad=floating and draw(st.booleans()))
    if floating and found.dtype.itemsize >= 4 and draw(st.booleans()):
        return found.detach().requires_grad_()
    return found


@st.composite
def saved_objects(draw: Any) -> Any:
    """Draw nested containers of values and tensors; some objects are in several places."""
    bases = draw(storages())
    pool: list[Any] = [draw(views(bases)) for _ in range(draw(st.integers(1, 5)))]
    for _ in range(draw(st.integers(0, 5))):
        members = draw(st.lists(st.one_of(VALUES, st.sampled_from(pool)), max_size=4))
        names = draw(st.lists(NAMES, min_size=len(members), max_size=len(members), unique=True))
        kind = draw(st.sampled_from([list, tuple, dict, OrderedDict, "attributes", "circle"]))
        if kind in {list, tuple}:
            pool.append(kind(members))
        elif kind in {dict, OrderedDict}:
            pool.append(kind(zip(names, members, strict=True)))
        elif kind == "attributes":
            ordered = OrderedDict(zip(names, members, strict=True))
            ordered._metadata = OrderedDict({"": {"version": 1}})
            pool.append(ordered)
        else:
            circle: list[Any] = list(members)
            circle.append(circle)
            pool.append(circle)
    return draw(st.sampled_from([pool, pool[-1], dict(enumerate(pool)), OrderedDict(a=pool)]))


@pytest.mark.property
@given(saved_objects(), st.booleans(), st.sampled_from([None, "cpu", "meta"]))
def test_random_objects(tmp_path_factory: Any, content: Any, mmap: bool, location: Any) -> None:
    """Objects, storages and ties are equal, or both libraries refuse the file."""
    path = tmp_path_factory.mktemp("files") / "file.pt"
    with quiet():
        _, unwritten = outcome(torch.save, content, path)
        if unwritten is not None:
            # Torch refuses to write one storage with two dtypes.
            assert "view the same data as different types" in str(unwritten)
            return
        # An empty string of bytes is written as a call, which torch refuses and modkit allows.
        with torch.serialization.safe_globals([(bytes, "__builtin__.bytes"), bytes]):
            expected, refused = outcome(
                torch.load, path, map_location=location, weights_only=True, mmap=mmap
            )
        if refused is not None:
            with pytest.raises(FileError):
                load_checkpoint(path, location, mmap=mmap)
            return
        assert_same(load_checkpoint(path, location, mmap=mmap), expected)


pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

REAL = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
COMPLEX = (torch.complex32, torch.complex64, torch.complex128)
EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2)
INTEGERS = (torch.int64, torch.int8, torch.uint8, torch.bool)
SHAPES = ((), (1,), (0, 3), (3, 4), (2, 1, 5))
FORMATS = ("torch", "torch shards", "safetensors", "safetensors shards")


class Files(NamedTuple):
    """The files that are averaged, and the options of the call."""

    dtypes: tuple[torch.dtype, ...] = (*REAL, *COMPLEX, *EIGHT_BITS, *INTEGERS)
    shapes: tuple[tuple[int, ...], ...] = SHAPES
    format: str = "torch"
    weights: tuple[float, ...] = (1.0, 2.0, 0.5)
    with_weights: bool = True
    # Real and complex dtypes of the later files are others of the same kind.
    other_dtypes: bool = False
    dtype: torch.dtype | None = None
    key: str | None = None
    scale: float = 1.0

    def states(self) -> list[dict[str, Tensor]]:
        """Return one state for each file."""
        generator = torch.Generator().manual_seed(0)
        return [self.state(index, generator) for index in range(len(self.weights))]

    def state(self, index: int, generator: torch.Generator) -> dict[str, Tensor]:
        """Return the state of one file, in which ``tied`` is the first tensor."""
        found = {}
        for number, dtype in enumerate(self.dtypes):
            shape = self.shapes[number % len(self.shapes)]
            chosen = self.other_dtype(dtype) if self.other_dtypes and index else dtype
            found[f"{number}.{str(dtype)[6:]}"] = self.tensor(shape, chosen, generator)
        if "torch" in self.format:
            found["tied"] = next(iter(found.values()))
        return found

    def other_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return another dtype of the same kind, that of integers too."""
        for kind in (REAL, COMPLEX, EIGHT_BITS):
            if dtype in kind:
                return kind[(kind.index(dtype) + 1) % len(kind)]
        return dtype

    def tensor(
        self, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator
    ) -> Tensor:
        """Return random values."""
        if dtype in INTEGERS:
            return torch.randint(0, 100, shape, generator=generator).to(dtype)
        wide = torch.complex128 if dtype.is_complex else torch.float64
        values = torch.randn(shape, dtype=wide, generator=generator)
        # Whatever the dtype, the values are finite.
        return (values * self.scale).to(dtype)

    def written(self, states: list[dict[str, Tensor]], folder: Path) -> list[Path]:
        """Write the files and return their paths."""
        return [self.file(state, folder / str(index)) for index, state in enumerate(states)]

    def file(self, state: dict[str, Tensor], folder: Path) -> Path:
        """Write one file, or an index and two files."""
        folder.mkdir()
        is_torch = "torch" in self.format
        file = "pytorch_model.bin" if is_torch else "model.safetensors"
        if "shards" not in self.format:
            self.save(state, folder / file)
            return folder / file
        names = list(state)
        # Tied tensors stay in one file, as transformers writes them.
        second = set(names[1:-1][::2])
        shards = {name: f"{int(name in second)}-{file}" for name in names}
        for shard in set(shards.values()):
            content = {name: state[name] for name in names if shards[name] == shard}
            self.save(content, folder / shard)
        (folder / f"{file}.index.json").write_text(json.dumps({"weight_map": shards}))
        return folder

    def save(self, state: dict[str, Tensor], file: Path) -> None:
        """Write one file, with the state at ``key``."""
        if "safetensors" in self.format:
            from safetensors.torch import save_file

            save_file({name: tensor.contiguous() for name, tensor in state.items()}, file)
            return
        content: Any = state
        for part in reversed(self.key.split(".") if self.key else []):
            content = {part: content, "epoch": 3}
        torch.save(content, file)


def mean(tensors: list[Tensor], weights: tuple[float, ...]) -> Tensor:
    """Return the weighted mean in float64 or complex128."""
    wide = torch.complex128 if tensors[0].is_complex() else torch.float64
    total = math.fsum(weights)
    parts = [
        tensor.to(wide) * (share / total) for tensor, share in zip(tensors, weights, strict=True)
    ]
    return torch.stack(parts).sum(0)


def expected_dtype(files: Files, first: Tensor) -> torch.dtype:
    """Return the chosen dtype for averages of its kind, else that of the first file."""
    chosen = files.dtype
    if chosen is None or not averaged(first) or chosen.is_complex != first.is_complex():
        return first.dtype
    return chosen


def averaged(tensor: Tensor) -> bool:
    """Return True for floating-point and complex tensors."""
    return tensor.is_floating_point() or tensor.is_complex()


def allowed_error(expected: Tensor, dtype: torch.dtype, tensors: list[Tensor]) -> Tensor:
    """Return the largest error of each element: of sums in float32 or wider, and of the final cast."""
    wide = all(tensor.dtype.itemsize >= 8 * (1 + tensor.is_complex()) for tensor in tensors)
    eps = torch.finfo(torch.float64 if wide else torch.float32).eps
    largest = max(float(tensor.to(expected.dtype).abs().max()) for tensor in tensors)
    # The sum of a step has its rounding, and its factors have theirs.
    summed = 4 * len(tensors) * eps * largest
    final = torch.finfo(dtype)
    # Parts of a complex number are rounded alone.
    return expected.abs() * final.eps / 2 + summed + final.tiny * final.eps


def check(files: Files, folder: Path) -> None:
    """Average files of random tensors, and compare each tensor with the reference."""
    states = files.states()
    paths = files.written(states, folder)
    weights = files.weights if files.with_weights else (1.0,) * len(paths)
    fractions: list[float] = []
    found = modkit.average_checkpoints(
        paths,
        files.weights if files.with_weights else None,
        key=files.key,
        dtype=files.dtype,
        progress=fractions.append,
    )

    assert found.keys() == states[0].keys()
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0
    for name, average in found.items():
        tensors = [state[name] for state in states]
        assert average.shape == tensors[0].shape
        if not averaged(tensors[0]):
            assert freeze(average) == freeze(tensors[-1]), name
            continue
        expected = mean(tensors, weights)
        assert average.dtype == expected_dtype(files, tensors[0]), name
        if average.numel():
            error = (average.to(expected.dtype) - expected).abs()
            assert bool((error <= allowed_error(expected, average.dtype, tensors)).all()), name


# Safetensors store neither all complex dtypes nor tied tensors.
PLAIN = (*REAL, *EIGHT_BITS, *INTEGERS)
SAMPLE = [
    Files(),
    Files(weights=(0.0, 1.0, 0.0, 3.0)),
    Files(with_weights=False, other_dtypes=True),
    Files(format="torch shards", key="ema.model", dtype=torch.float64),
    Files(dtype=torch.bfloat16, scale=1e-3),
    Files(dtype=torch.complex64, key="model"),
    Files(PLAIN, format="safetensors", dtype=torch.float16),
    Files(PLAIN, format="safetensors shards", weights=(1.0,), with_weights=False),
]


def check_if_possible(files: Files, folder: Path) -> None:
    """Run a case, unless it needs safetensors and that is not there."""
    if "safetensors" in files.format and not installed("safetensors"):
        pytest.skip("needs safetensors")
    check(files, folder)


@for_each("files", SAMPLE)
def test_a_sample_of_files(tmp_path: Path, files: Files) -> None:
    """Averages are weighted means, in the dtype of the first file or the chosen one."""
    check_if_possible(files, tmp_path)


@st.composite
def any_files(draw: Any) -> Files:
    """Draw files of any format, and options that fit them."""
    kind = draw(st.sampled_from(FORMATS))
    possible = PLAIN if "safetensors" in kind else (*PLAIN, *COMPLEX)
    weights = draw(st.lists(st.sampled_from([0.0, 1e-6, 0.3, 1.0, 7.0]), min_size=1, max_size=5))
    return Files(
        tuple(draw(st.lists(st.sampled_from(possible), min_size=3, max_size=8))),
        tuple(draw(st.lists(st.sampled_from(SHAPES), min_size=1, max_size=4))),
        kind,
        tuple(weights) if any(weights) else (*weights, 1.0),
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.sampled_from([None, *REAL, torch.complex64])),
        draw(st.sampled_from([None, "model", "ema.model"])) if "torch" in kind else None,
        draw(st.sampled_from([1.0, 1e-3, 30.0])),
    )


@pytest.mark.property
@given(any_files())
def test_random_files(files: Files) -> None:
    """Any dtypes, shapes, formats and weights."""
    with tempfile.TemporaryDirectory() as folder:
        check_if_possible(files, Path(folder))
