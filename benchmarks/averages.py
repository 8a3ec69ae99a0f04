"""Rows of weight averages: each relative to torch, or to the kernels that the job needs at least.

A floor is timed in the same process over the same tensors: list kernels for an update, two loops in
C that set the data for a swap, three copies of lists for store(), copy_to() and restore().
"""

import tempfile
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any, Final

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.profiler import profile

import modkit
from benchmarks.averaging_contestants import gpt2
from benchmarks.measure import Arms, Code, Row
from benchmarks.rows import Names, against, both, sibling


UPDATE: Final = "average.update_parameters(m)"
SMALL: Final = "512 small tensors with BatchNorm"
LERP: Final = "torch._foreach_lerp_(old, new, 0.01)"
EMA: Final = "ema.update()"
OTHER: Final = "other.update()"
APPLIED: Final = "with ema.applied(): pass"
UPDATE_FLOOR: Final = "for kernel, old, new, *weight in lists: kernel(old, new, *weight)"
SWAP_FLOOR: Final = (
    "deque(map(set_data, parameters, averages), 0); deque(map(set_data, parameters, weights), 0)"
)
STORE: Final = "ema.store(); ema.copy_to(); ema.restore()"
STORE_FLOOR: Final = (
    "copy(stored, parameters); copy(parameters, averages); copy(parameters, stored)"
)


def averaged(model: Any, library: Any, **options: Any) -> Any:
    """Return an average that has copied the model, so that the next update averages."""
    rule = library.get_ema_multi_avg_fn(0.99)
    average = library.AveragedModel(model, multi_avg_fn=rule, **options)
    for _ in range(3):
        average.update_parameters(model)
    return average


def small_tensors(nn: Any) -> Names:
    """Average 512 parameters of at most 16 elements, and the buffers of 64 BatchNorms."""
    pairs = (nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(64))
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(192)), *pairs)
    library = sibling(nn, "optim.swa_utils")
    tensors = {"new": [torch.zeros(16)] * 512, "old": [torch.zeros(16) for _ in range(512)]}
    average = averaged(model, library)
    return {"m": model, "library": library, "average": average, "torch": torch, **tensors}


def parameters(shapes: list[tuple[int, ...]]) -> Any:
    """Make a model of parameters only."""
    return torch.nn.ParameterList(torch.zeros(shape) for shape in shapes)


def emas(model: Any, **options: Any) -> Names:
    """Return an ``EMA`` that has copied the model, a second one with options, and what floors use."""
    names = {"ema": modkit.EMA(model), "other": modkit.EMA(model, **options)}
    for ema in [*names.values()] * 3:
        ema.update()
    return {**names, **floors(model)}


def floors(model: Any) -> Names:
    """Return lists of tensors, and the kernels that average, swap or copy them."""
    weights = list(model.parameters())
    averages = [weight.detach().float().clone() for weight in weights]
    lists: list[tuple[Any, ...]] = [
        (partial(torch._foreach_lerp_, weight=0.01), averages, [w.detach() for w in weights])
    ]
    if weights[0].dtype != torch.float32:
        # An average that is wider than its parameter needs a list of wide copies.
        wide = [torch.empty_like(average) for average in averages]
        copies = (torch._foreach_copy_, wide, [w.detach() for w in weights])
        lists = [copies, (partial(torch._foreach_lerp_, weight=0.01), averages, wide)]
    for dtype in {buffer.dtype for buffer in model.buffers()}:
        buffers = [buffer for buffer in model.buffers() if buffer.dtype == dtype]
        lists.append((torch._foreach_copy_, [buffer.clone() for buffer in buffers], buffers))
    return {
        "lists": lists,
        "deque": deque,
        "set_data": torch.Tensor.data.__set__,  # type: ignore[attr-defined]
        "copy": torch.no_grad()(torch._foreach_copy_),
        "parameters": weights,
        "averages": averages,
        "weights": [weight.detach() for weight in weights],
        "stored": [weight.detach().clone() for weight in weights],
    }


def tiny() -> Names:
    """Average 1,000 parameters of 16 elements, once and with four decays."""
    return emas(parameters([(4, 4)] * 1000), decay=[0.9, 0.99, 0.999, 0.9999])


def linear_and_norm() -> Names:
    """Average 512 times a layer and its normalization, with their statistics."""
    pairs = (
        torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)) for _ in range(512)
    )
    return emas(torch.nn.Sequential(*pairs))


def mlp() -> Names:
    """Average the two layers of an RL agent."""
    linear = torch.nn.Linear
    return emas(torch.nn.Sequential(linear(64, 64), torch.nn.ReLU(), linear(64, 4)))


def skipping() -> Names:
    """Average 16M elements, with and without a test for values that are not finite."""
    return emas(parameters([(1000, 1000)] * 16), on_nonfinite="skip")


def large(dtype: torch.dtype = torch.float32, *, averaged_model: bool = False) -> Names:
    """Average GPT-2 small in float32."""
    model = gpt2(1, dtype)
    if not averaged_model:
        return emas(model)
    average = averaged(model, sibling(modkit.nn, "optim.swa_utils"), precision="fp32")
    return {"m": model, "average": average, **floors(model)}


def stepping() -> Names:
    """Train 64 layers, with an average that is updated by hand, and with one that is attached."""
    names: Names = {}
    for name in ("by_hand", "attached"):
        model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(64)))
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        ema = modkit.EMA(model)
        if name == "attached":
            ema.attach(optimizer)
        for _ in range(3):
            optimizer.step()
            if name == "by_hand":
                ema.update()
        names |= {f"{name}_ema": ema, name: optimizer}
    return names


def sharded(stack: ExitStack) -> Arms:
    """Average 60 layers that FSDP2 has sharded to one rank, and the same layers as they are."""
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=0, world_size=1
    )
    stack.callback(distributed.destroy_process_group)
    mesh = init_device_mesh("cpu", (1,))
    arms: dict[str, Code] = {}
    for name in ("plain", "modkit"):
        model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(60)))
        if name == "modkit":
            for layer in model:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
        arms[name] = Code(EMA, emas(model)) if name == "plain" else Code(EMA, _only_ema(model))
    return arms


def _only_ema(model: Any) -> Names:
    ema = modkit.EMA(model)
    for _ in range(3):
        ema.update()
    return {"ema": ema}


def after(call: Callable[[modkit.EMA], object], _: ExitStack) -> Arms:
    """Time a swap after a call on the same average, and after the call on another one."""
    names = {name: tiny()["ema"] for name in ("same", "unrelated")}

    def arm(called: str, number: int) -> float:
        seconds = 0.0
        for _ in range(number):
            call(names[called])
            start = time.thread_time()
            with names["same"].applied():
                pass
            seconds += time.thread_time() - start
        return seconds

    return {"unrelated": partial(arm, "unrelated"), "modkit": partial(arm, "same")}


def bytes_of_skipping(_: ExitStack) -> Arms:
    """Sum the allocations of one update, relative to the size of the model."""
    ema = skipping()["other"]

    def run(number: int) -> float:
        with profile(profile_memory=True) as found:
            ema.update()
        return number * float(sum(max(0, e.self_cpu_memory_usage) for e in found.key_averages()))

    return {"model": lambda number: number * 64e6, "modkit": run}


def _update(what: str, budget: float, make: Callable[[], Names], statement: str = EMA) -> Row:
    face = "EMA.update()" if statement == EMA else "AveragedModel.update_parameters()"
    return against(f"{face} / list kernels, {what}", budget, UPDATE_FLOOR, statement, make)


large_bf16 = partial(large, torch.bfloat16)
large_model = partial(large, torch.bfloat16, averaged_model=True)
TWICE: Final = "with other.applied(index=0): pass\nwith other.applied(index={}): pass"

ROWS: Final = [
    both(f"AveragedModel.update_parameters(), {SMALL}", UPDATE, small_tensors, 0.28, LERP, 0.28),
    both(f"AveragedModel(model), {SMALL}", "library.AveragedModel(m)", small_tensors),
    _update("1,000 tiny tensors", 1.5, tiny),
    _update("512 x (Linear, BatchNorm)", 1.4, linear_and_norm),
    _update("an MLP of 4 tensors", 5.0, mlp),
    _update("124M fp32", 1.05, large),
    _update("124M bf16 in fp32", 1.4, large_bf16),
    _update("124M bf16 in fp32", 1.4, large_model, UPDATE),
    against("EMA.update(), four averages / one, 1,000 tiny tensors", 3.3, EMA, OTHER, tiny, 3.3),
    against("EMA.update(), on_nonfinite='skip' / 'ignore', 16M", 1.5, EMA, OTHER, skipping),
    Row("EMA.update(), on_nonfinite='skip': memory / model", 0.01, bytes_of_skipping, unit="B"),
    Row("EMA.update(), FSDP2 on one rank / not sharded, 60 layers", 3.0, sharded),
    against(
        "optimizer.step(), attached / step and update, 64 layers",
        *(1.1, "by_hand.step(); by_hand_ema.update()", "attached.step()", stepping),
    ),
    against(
        "EMA.applied() / loops that set the data, 1,000 tensors", 2.0, SWAP_FLOOR, APPLIED, tiny
    ),
    against(
        "EMA.applied(), two averages in turn / the same one, 1,000 tensors",
        *(1.2, TWICE.format(0), TWICE.format(1), tiny),
    ),
    Row(
        "EMA.applied(), after averaged_model() of it / of another, 1,000 tensors",
        1.2,
        partial(after, modkit.EMA.averaged_model),
    ),
    against(
        "store(); copy_to(); restore() / three copies of lists, 1,000 tensors",
        *(3.0, STORE_FLOOR, STORE, tiny),
    ),
]
