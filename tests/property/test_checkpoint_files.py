"""Random objects written by torch.save: load_checkpoint and torch.load return equal objects."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor, nn

from modkit import load_checkpoint
from modkit.errors import FileError
from tests.unit.files.checkpoint_zoo import DTYPES, filled, quiet
from tests.unit.files.same_objects import assert_same, outcome


pytestmark = pytest.mark.property

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
def tensors(draw: Any, bases: list[Tensor]) -> Tensor:
    """Draw a view of one of the bases, or a base, as a tensor or a parameter."""
    found = draw(st.sampled_from(bases))
    count = found.numel()
    kind = draw(st.sampled_from(["base", "slice", "strided", "scalar", "expanded", "parameter"]))
    if kind == "slice":
        start = draw(st.integers(0, count))
        found = found[start : draw(st.integers(start, count))]
    elif kind == "strided" and count >= 6:
        sizes = draw(st.sampled_from([(2, 3), (3, 2), (1, 6), (2, 0), (2, 1, 2)]))
        strides = tuple(draw(st.integers(0, 2)) for _ in sizes)
        found = found.as_strided(sizes, strides, draw(st.integers(0, 1)))
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
def contents(draw: Any) -> Any:
    """Draw nested containers of values and tensors; some objects are in several places."""
    bases = draw(storages())
    pool: list[Any] = [draw(tensors(bases)) for _ in range(draw(st.integers(1, 5)))]
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


@given(contents(), st.booleans(), st.sampled_from([None, "cpu", "meta"]))
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
