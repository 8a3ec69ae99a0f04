from typing import Final

import torch

import modkit.nn
from tests.cases import for_each
from tests.helpers import Implementation


# Inherited by ``modkit.nn.Module``, each with who compares it, reads its code or patches it.
TORCHS_OWN: Final[dict[str, str]] = {
    "__call__": "dynamo traces `forward` directly if it is torch's; the profiler knows the call of a "
    "module by its code object; fx and torch.ao patch torch's, torchview's recorder does too",
    "_wrapped_call_impl": "`__call__` is this function: its code object is what the profiler knows",
    "_call_impl": "dynamo leaves out a call without hooks if it is torch's; `compile()` compiles it",
    "_compiled_call_impl": "None on the class means that a module is not compiled: users ask it before "
    "they compile, torch's own tests too",
    "_slow_forward": "tracing takes the scope names of a graph from it",
    "__getattr__": "dynamo reads members itself if it is torch's; fx patches torch's",
    "__setattr__": "FSDP2 and tensordict write to the tables of members if it is torch's; dynamo traces "
    "an assignment as one of a member",
    "__delattr__": "dynamo traces a deletion as one of a member",
    "__dir__": "goes with `__getattr__`: it lists what that finds",
    "__setstate__": "dynamo patches torch's to see modules that are unpickled",
    "register_buffer": "torch's `__setattr__` compares it: at each assignment of a buffer, the signature of "
    "another function is inspected",
    "named_parameters": "dynamo names the tensors of a graph if it is torch's",
    "named_buffers": "dynamo names the tensors of a graph if it is torch's",
    "forward": "dynamo, FSDP2 and TorchScript ask whether a class implements it",
    "get_extra_state": "`state_dict()` and torch.distributed.checkpoint ask whether a class implements it",
    "set_extra_state": "`load_state_dict()` asks whether a class implements it",
    "__getstate__": "guards of dynamo are pickled with modules whose function is torch's",
}


# With a reason in the README of the folder, and tests of its own below `tests/parity`.
OVERRIDDEN: Final = {
    *("_apply", "_get_backward_pre_hooks", "_load_from_state_dict", "add_module", "apply"),
    *("load_state_dict", "named_modules", "register_parameter", "to"),
}


def test_all_other_methods_are_inherited() -> None:
    """Methods that are not listed are torch's own, so that torch's tests hold for them."""
    defined = {name for name, value in vars(modkit.nn.Module).items() if callable(value)}

    assert defined == OVERRIDDEN


@for_each("name", TORCHS_OWN)
def test_what_tools_compare_is_torchs_own(impl: Implementation, name: str) -> None:
    """The class inherits the function, and so do classes of users; nothing shadows or aliases it."""
    expected = getattr(torch.nn.Module, name)

    class Net(impl.Module):
        pass

    assert getattr(impl.Module, name) is expected
    assert getattr(Net, name) is expected
    assert name not in vars(modkit.nn.Module)
