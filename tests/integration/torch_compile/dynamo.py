"""Helpers of the tests of ``torch.compile``."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter


# The tracer looks at ``.grad`` of every tensor that enters a frame, results of earlier ones too.
compiled_tests = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


class Recorder:
    """A compiled network that counts its frames and keeps what each call returned."""

    def __init__(self, net: torch.nn.Module, **options: Any) -> None:
        self.net = net
        self.counter = CompileCounter()
        self.compiled = torch.compile(net, backend=self.counter, fullgraph=True, **options)
        self.outputs: list[Tensor] = []

    def call(self, *args: Any, **kwargs: Any) -> None:
        """Call the compiled network, and check the value against the network run eagerly."""
        expected = copy.deepcopy(self.net)(*args, **kwargs)
        result = self.compiled(*args, **kwargs)
        torch.testing.assert_close(result, expected, rtol=0, atol=0)
        self.outputs.append(result.detach())

    def report(self) -> tuple[list[Tensor], int, int]:
        """Tell outputs, compiled frames and the number of operations in their graphs."""
        return self.outputs, self.counter.frame_count, self.counter.op_count
