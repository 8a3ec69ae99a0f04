"""The description of tensors and of other values in an outcome."""

import dataclasses

import pytest
import torch

from modkit.compat.outcomes import freeze, freeze_tensor, leaves


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
def test_in_a_compiled_function_the_digest_is_that_of_the_elements() -> None:
    """Hooks that a compiled model calls may describe tensors, whose memory must live so long."""
    compiled = torch.compile(lambda tensor: freeze_tensor(tensor + 1), backend="eager")
    ones = torch.zeros(2000) + 1

    assert compiled(torch.zeros(2000)) == freeze_tensor(ones)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_sparse_tensors_of_each_layout_are_compared_by_their_elements() -> None:
    """A model with such a buffer is compared, with the elements of the dense tensor."""
    eye = torch.eye(2)
    for layout in torch.sparse_coo, torch.sparse_csr, torch.sparse_csc:
        described = [freeze_tensor(tensor.to_sparse(layout=layout)) for tensor in (eye, 2 * eye)]
        assert [f"{text} " in freeze_tensor(eye) for text in described] == [True, False]


@dataclasses.dataclass
class Output:
    """The output of a network, in place of a tuple."""

    value: torch.Tensor
    missing: object = dataclasses.field(init=False)


def test_dataclasses_are_compared_by_field():
    """Their text leaves out elements of large tensors, and a field may have no value."""
    zeros, other = torch.zeros(5000), torch.zeros(5000)
    other[2500] = 1

    assert freeze(Output(zeros)) == freeze(Output(zeros.clone()))
    assert freeze(Output(zeros)) != freeze(Output(other))
    assert freeze(Output) == "Output"
    assert leaves([Output(zeros), {"a": other}]) == [zeros, other]
