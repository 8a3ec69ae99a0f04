"""Counting what processes say to one another.

Torch's ``CommDebugMode`` counts, too, but with hooks on all modules, and no bytes.
"""

from collections import Counter
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


# Operators that communicate. Those that only wait, or make a group, are left out.
KINDS = {
    "c10d::allreduce_": "all_reduce",
    "c10d::allreduce_coalesced_": "all_reduce",
    "_c10d_functional::all_reduce": "all_reduce",
    "_c10d_functional::all_reduce_": "all_reduce",
    "c10d::allgather_": "all_gather",
    "c10d::_allgather_base_": "all_gather",
    "_c10d_functional::all_gather_into_tensor": "all_gather",
    "c10d::reduce_scatter_": "reduce_scatter",
    "c10d::_reduce_scatter_base_": "reduce_scatter",
    "_c10d_functional::reduce_scatter_tensor": "reduce_scatter",
    "c10d::broadcast_": "broadcast",
    "_c10d_functional::broadcast": "broadcast",
    "c10d::barrier": "barrier",
}
SILENT = {
    "_c10d_functional::wait_tensor",
    "_c10d_functional::_wrap_tensor_autograd",
}


class Talk(TorchDispatchMode):
    """Counts collectives, and the bytes of the whole tensors that they gather, reduce or scatter."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.nbytes: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            # The operator's own parts are counted a second time.
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        name = func._schema.name if isinstance(func, torch._ops.OpOverload) else ""
        if name in KINDS:
            tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
            if name.startswith("_c10d_functional"):
                tensors += [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
            self.counts[KINDS[name]] += 1
            # The parts of a list belong together; a part and the whole do not.
            whole = [tensor.nbytes for tensor in tensors]
            self.nbytes[KINDS[name]] += max(whole, default=0)
        elif name.startswith(("c10d::", "_c10d_functional::")) and name not in SILENT:
            raise AssertionError(f"{name} is not in the table of collectives")
        return result
