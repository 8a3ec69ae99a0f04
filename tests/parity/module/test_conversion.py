from typing import Final

import pytest
import torch
from torch.torch_version import TorchVersion

from tests.cases import for_each
from tests.helpers import Implementation, same
from tests.models import child_leaf, empty, leaf, with_dtypes
from tests.parity.module.contents import run, state


CONVERSIONS = (
    "m.float()",
    "m.double()",
    "m.half()",
    "m.bfloat16()",
    "m.cpu()",
    "m.type(torch.float64)",
    "m.type(torch.complex64)",
    "m.type('torch.DoubleTensor')",
    "m.type(torch.DoubleTensor)",
    "m.to('cpu')",
    "m.to(torch.device('cpu'))",
    "m.to('cpu', torch.float64)",
    "m.to('cpu', torch.float64, True)",
    "m.to('cpu', non_blocking=True)",
    "m.to(device='cpu', dtype=torch.float16)",
    "m.to(None)",
    "m.to()",
    "m.to(device=None, dtype=None)",
    "m.to(torch.float64)",
    "m.to(torch.float64, True)",
    "m.to(dtype=torch.bfloat16, non_blocking=False)",
    "m.to(ones(1).double())",
    "m.to(ones(1).half(), True)",
    "m.to(tensor=ones(1).double())",
    "m.to(torch.float8_e4m3fn)",
    "m.to('meta')",
    "m.to('meta', torch.float64)",
    "m.to(memory_format=torch.channels_last)",
    "m.to(memory_format=torch.preserve_format)",
    "m.to(memory_format=torch.contiguous_format)",
    "m.to_empty(device='meta')",
    "m.to_empty(device='meta', recurse=False)",
    "m.share_memory()",
    "m.requires_grad_(False)",
    "m.requires_grad_(requires_grad=False)",
    "m._apply(lambda t: t)",
    "m._apply(lambda t: t * 2)",
    "m._apply(lambda t: t[:1])",
    "m._apply(lambda t: t.detach())",
    "m._apply(lambda t: t, recurse=False)",
)


@pytest.mark.filterwarnings("ignore:Casting complex values to real")
@for_each("call", CONVERSIONS)
def test_conversions(call):
    """Dtypes, devices, values, gradients and errors are torch's, and so is what stays one object."""

    def scenario(impl):
        module = with_dtypes(impl)
        members = dict(module.named_parameters()) | dict(module.named_buffers())
        pointers = {name: tensor.data_ptr() for name, tensor in members.items()}
        grads = {name: tensor.grad for name, tensor in members.items() if tensor.is_leaf}
        returned = run(call, module) is module
        after = dict(module.named_parameters()) | dict(module.named_buffers())
        same_objects = [
            (
                name,
                after[name] is tensor,
                after[name].is_meta or after[name].data_ptr() == pointers[name],
                after[name].grad is grads.get(name) if after[name].is_leaf else None,
            )
            for name, tensor in members.items()
        ]
        return returned, state(module), same_objects

    assert same(scenario)[0] == "returned"


@for_each("call", ["m.cpu()", "m.to('cpu')", "m.to(ones(1))", "m.float().cpu()"])
def test_leaving_the_meta_device(call):
    """Moving off the meta device is refused with the advice to use ``to_empty``."""
    assert same(lambda impl: run(call, leaf(impl).to("meta")))[0] == "raised"


# Older torch names its own line.
AT_THE_CALLER: Final = TorchVersion(torch.__version__) >= "2.10"


def test_casting_to_complex_warns_at_the_callers_line(impl: Implementation) -> None:
    """A complex target dtype is announced as experimental, where ``to`` was called."""
    module = leaf(impl)
    with pytest.warns(UserWarning, match="Complex modules are a new feature") as caught:
        module.to(torch.complex64)

    assert AT_THE_CALLER == ([warning.filename for warning in caught] == [__file__])
    assert module.weight.dtype is torch.complex64
    assert module.steps.dtype is torch.int64


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_gradients_that_have_a_history():
    """Converting a parameter whose gradient is part of a graph ends as in torch."""

    def scenario(impl):
        found = []
        for call in ("m.double()", "m.to('meta')", "m.cpu()"):
            module = child_leaf(impl)
            (module.weight**2).sum().backward(create_graph=True)
            try:
                run(call, module)
            except Exception as error:
                found.append((type(error).__name__, str(error)))
            found.append(state(module))
            module.weight.grad = None
        return found

    assert same(scenario)[0] == "returned"


def test_apply_gets_every_tensor_in_torchs_order():
    """``_apply`` passes children's tensors first, then parameter, gradient, parameter …, buffers."""

    def scenario(impl):
        module, seen = with_dtypes(impl), []
        module.child.child = child_leaf(impl)
        names = {id(p): name for name, p in module.named_parameters()}
        names |= {id(b): name for name, b in module.named_buffers()}
        names |= {id(p.grad): f"{name}.grad" for name, p in module.named_parameters()}
        module._apply(lambda t: (seen.append((names.get(id(t)), torch.is_grad_enabled())), t)[1])
        return seen

    assert same(scenario)[0] == "returned"


@for_each("call", ["m.to('cpu')", "m.to(float64)", "m.to(memory_format=channels_last)", "m.half()"])
def test_what_is_not_a_tensor_cannot_be_converted(call):
    """A number among the parameters is reported by the first attribute that torch asks for."""

    def scenario(impl):
        module = leaf(impl)
        module._parameters["weight"] = 3
        return run(call, module)

    assert same(scenario)[0] == "raised"


def test_other_operations_that_are_not_implemented():
    """An error that is not about the meta device has the text of the tensor that raises it."""

    class Odd(torch.Tensor):
        def to(self, *_):
            raise NotImplementedError("not for this tensor")

    def scenario(impl):
        module = empty(impl)
        module.register_buffer("x", torch.ones(1).as_subclass(Odd))
        return module.to(torch.float64)

    expected = ("raised", "NotImplementedError", "not for this tensor")
    assert same(scenario) == expected
