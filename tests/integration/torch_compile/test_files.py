"""Checkpoints that are written and read in compiled code."""

from pathlib import Path

import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from modkit import average_checkpoints, load_checkpoint, save_checkpoint
from tests.integration.torch_compile.dynamo import compiled_tests


pytestmark = compiled_tests


def test_checkpoints_in_compiled_code_are_left_alone(tmp_path: Path) -> None:
    """As with functions under `torch.compiler.disable`, dynamo traces none of their lines, and warns of none."""
    path = tmp_path / "last.pt"
    save_disabled, load_disabled = map(torch.compiler.disable, (torch.save, torch.load))

    def with_torch(x: Tensor) -> Tensor:
        save_disabled({"x": x * 2}, path)
        y = x * 3
        return load_disabled(path)["x"] + y

    def with_modkit(x: Tensor) -> Tensor:
        save_checkpoint({"x": x * 2}, path)
        y = x * 3
        return load_checkpoint(path)["x"] + y

    found = []
    for function in (with_torch, with_modkit):
        torch._dynamo.reset()
        counter = CompileCounter()
        result = torch.compile(function, backend=counter)(torch.ones(2))
        found.append((result.tolist(), counter.frame_count, counter.op_count))

    assert found == [([5.0, 5.0], 3, 3)] * 2


def test_an_average_of_files_in_compiled_code(tmp_path: Path) -> None:
    """The function runs as it is between two graphs."""
    for number in range(2):
        save_checkpoint({"x": torch.full((2,), float(number))}, tmp_path / f"{number}.pt")

    def blended(x: Tensor) -> Tensor:
        average = average_checkpoints([tmp_path / "0.pt", tmp_path / "1.pt"])
        return x * 2 + average["x"]

    counter = CompileCounter()
    result = torch.compile(blended, backend=counter)(torch.ones(2))

    assert (result.tolist(), counter.frame_count) == ([2.5, 2.5], 1)
