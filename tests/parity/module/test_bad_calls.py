import torch

from tests.cases import for_each
from tests.helpers import Implementation, same
from tests.models import tree
from tests.parity.module.contents import raises_like_torch, run


@for_each(
    "call",
    [
        "m.apply(None)",
        "m.apply(lambda module: module.missing)",
        "list(m.named_modules(memo=3))",
        "m.to(torch.int8)",
        "m.to(torch.bool)",
        "m.to(dtype=torch.int64)",
        "m.to(ones(1).int())",
        "m.to('cpu', torch.int32)",
        "m.to('nowhere')",
        "m.to('cpu:0:0')",
        "m.to(other=ones(1).double())",
        "m.to([torch.float32])",
        "m.to('float32')",
        "m.to(Identity())",
        "m.to(device='cpu', kind=1)",
        "m.to(torch.float32, torch.float64)",
        "m.to(memory_format='channels_last')",
        "m.to(torch.preserve_format, torch.float64, False, False)",
        "m.to(torch.complex64)",
        "m.type(torch.int8)",
        "m.type('torch.NoTensor')",
        "m.type(3)",
        "m.to_empty()",
        "m.to_empty('cpu')",
        "m.to_empty(device='nowhere')",
        "m.float(1)",
        "m._apply(None)",
        "m._apply(lambda tensor: tensor.missing)",
        "m._apply(lambda tensor: None)",
        "m._apply(lambda tensor: 3)",
    ],
)
def test_calls_with_bad_arguments(impl: Implementation, call: str) -> None:
    """A bad argument is refused before the first module or tensor is changed."""
    before, after = raises_like_torch(impl, tree, call)

    assert before == after


MISFITS = {
    "parameter": lambda: torch.nn.Parameter(torch.ones(1)),
    "int": lambda: 3,
    "str": lambda: "child",
    "object": object,
}
WALKS = (
    "m.float()",
    "m.train()",
    "m.apply(id)",
    "m.state_dict()",
    "m.load_state_dict({})",
    "list(m.named_modules())",
    "list(m.modules())",
    "list(m.parameters())",
    "m.zero_grad()",
    "repr(m)",
)


@for_each("misfit", MISFITS)
@for_each("call", WALKS)
def test_what_is_not_a_module_among_the_children(misfit: str, call: str) -> None:
    """Something else that was written into the registry is refused with torch's text."""

    def scenario(impl: Implementation) -> object:
        module = impl.Module()
        module._modules["child"] = MISFITS[misfit]()
        return run(call, module) is module

    kind, *_ = same(scenario)

    assert kind == "raised" or call == "repr(m)"
