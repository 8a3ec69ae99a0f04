"""The description of a tensor in an outcome."""

import pytest
import torch

from modkit.compat.outcomes import freeze_tensor


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
def test_in_a_compiled_function_the_digest_is_that_of_the_elements() -> None:
    """Hooks that a compiled model calls may describe tensors, whose memory must live so long."""
    compiled = torch.compile(lambda tensor: freeze_tensor(tensor + 1), backend="eager")
    ones = torch.zeros(2000) + 1

    assert compiled(torch.zeros(2000)) == freeze_tensor(ones)
