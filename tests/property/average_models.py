"""Models with unusual tensors, what happens to them between updates, and references for their averages."""

import copy
import dataclasses
import math
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from modkit import nn, schedules


def holder(**members: Any) -> nn.Module:
    """Build a module from parameters, children and buffers (plain tensors)."""
    module = nn.Module()
    for name, member in members.items():
        if isinstance(member, Tensor) and not isinstance(member, nn.Parameter):
            module.register_buffer(name, member, persistent=not name.startswith("scratch"))
        else:
            setattr(module, name, member)
    return module


def parameter(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    """Return a parameter with random values."""
    return nn.Parameter(torch.randn(shape).to(dtype))


def tied() -> nn.Module:
    """Two layers that share a weight, and a buffer with two names."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    model.register_buffer("mean", torch.randn(3))
    model.register_buffer("center", model.mean)
    return model


def frozen() -> nn.Module:
    """A frozen layer, and one that trains."""
    return holder(frozen=nn.Linear(3, 3).requires_grad_(False), head=nn.Linear(3, 2))


def batch_norm() -> nn.Module:
    """Normalization with statistics, and one without."""
    return nn.Sequential(
        nn.Linear(3, 4), nn.BatchNorm1d(4), nn.BatchNorm1d(4, track_running_stats=False)
    )


def parametrized() -> nn.Module:
    """Parametrizations with original tensors and buffers of their own."""
    made = torch.nn.utils.parametrizations
    return nn.Sequential(
        made.spectral_norm(nn.Linear(3, 4)),
        made.weight_norm(nn.Linear(4, 3)),
        made.orthogonal(nn.Linear(3, 3)),
    )


def old_norms() -> nn.Module:
    """Norms that are computed by hooks, and leave a non-leaf tensor in the module."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.Sequential(
            torch.nn.utils.weight_norm(nn.Linear(3, 4)),
            torch.nn.utils.spectral_norm(nn.Linear(4, 3)),
        )


def buffers() -> nn.Module:
    """Integer buffers, and one that is not persistent."""
    return holder(
        weight=parameter(3),
        small=torch.tensor([1, -2, 3], dtype=torch.int8),
        bytes=torch.tensor([1, 2, 3], dtype=torch.uint8),
        mask=torch.tensor([True, False]),
        scratch=torch.randn(4),
    )


def integer_parameter() -> nn.Module:
    index = nn.Parameter(torch.tensor([3, 1, 2]), requires_grad=False)
    return holder(weight=parameter(3), index=index)


def complex_numbers() -> nn.Module:
    """Complex parameters of both widths, and a complex buffer."""
    return holder(
        narrow=parameter(3, dtype=torch.complex64),
        wide=parameter(2, 2, dtype=torch.complex128),
        phase=torch.randn(2, dtype=torch.complex64),
    )


def scalars_and_empty() -> nn.Module:
    """Tensors without dimensions, and tensors without elements."""
    return holder(
        scale=parameter(),
        nothing=parameter(0),
        no_rows=parameter(0, 3),
        count=torch.tensor(3),
        temperature=torch.tensor(0.5),
    )


def strided() -> nn.Module:
    """Tensors that are not contiguous."""
    image = torch.randn(2, 3, 4, 5)
    return holder(
        transposed=nn.Parameter(torch.randn(3, 4).t()),
        every_other=nn.Parameter(torch.randn(6, 4)[::2, ::2]),
        expanded=nn.Parameter(torch.randn(1, 4).expand(3, 4)),
        image=nn.Parameter(image.contiguous(memory_format=torch.channels_last)),
        narrow=nn.Parameter(torch.randn(4, 3).bfloat16().t()),
    )


def sparse_embedding() -> nn.Module:
    """Embeddings whose gradients are sparse."""
    return nn.Sequential(nn.Embedding(7, 3, sparse=True), nn.EmbeddingBag(5, 3, sparse=True))


def containers() -> nn.Module:
    """Parameters in containers, whose names are numbers and keys."""
    return holder(
        several=nn.ParameterList([parameter(2), parameter(3, 2)]),
        named=nn.ParameterDict({"left": parameter(2), "right": parameter(2, 2)}),
        layers=nn.ModuleDict({"linear": nn.Linear(2, 2)}),
    )


def child_called_module() -> nn.Module:
    """A child with the name that wrappers give to the wrapped module."""
    inner = holder(weight=parameter(3), module=nn.Linear(2, 2))
    return holder(weight=parameter(2), module=inner)


def lstm() -> nn.Module:
    """A recurrent layer, which keeps its weights in a list too."""
    return nn.Sequential(nn.LSTM(3, 4, num_layers=2, proj_size=2), nn.Linear(2, 2))


def mixed() -> nn.Module:
    """Parameters of every floating-point dtype that trains."""
    return nn.Sequential(
        nn.Linear(3, 3).bfloat16(),
        nn.Linear(3, 3).half(),
        nn.Linear(3, 3),
        nn.Linear(3, 3).double(),
    )


def views() -> nn.Module:
    """A module with two names, whose parameters are views of one flat tensor."""
    flat = torch.randn(14)
    inner = holder(
        weight=nn.Parameter(flat[:8].view(2, 4)),
        bias=nn.Parameter(flat[8:10]),
        gate=nn.Parameter(flat[10:].view(2, 2).t()),
    )
    return holder(student=inner, same=inner, running=torch.randn(3))


ZOO: dict[str, Callable[[], nn.Module]] = {
    build.__name__: build
    for build in (
        tied,
        frozen,
        batch_norm,
        parametrized,
        old_norms,
        buffers,
        integer_parameter,
        complex_numbers,
        scalars_and_empty,
        strided,
        sparse_embedding,
        containers,
        child_called_module,
        lstm,
        mixed,
        views,
    )
}


def build(name: str) -> nn.Module:
    """Return a model of the zoo with fixed weights."""
    torch.default_generator.manual_seed(0)
    return ZOO[name]()


def tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers, those with several names once."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def has_average(tensor: Tensor) -> bool:
    """Return True for floating-point and complex tensors."""
    return tensor.is_floating_point() or tensor.is_complex()


def memory_of(tensor: Tensor) -> Tensor:
    """Return a view that has each element of an expanded tensor once."""
    for dimension, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dimension] > 1:
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor


@torch.no_grad()
def move(model: nn.Module, step: int) -> None:
    """Take one step of a random walk with all tensors but the frozen ones."""
    generator = torch.Generator().manual_seed(step)
    for name, tensor in tensors(model).items():
        if name.startswith("frozen"):
            continue
        target = memory_of(tensor)
        if not has_average(tensor):
            drawn = torch.randint(0, 100, target.shape, generator=generator)
            target.copy_(drawn % 2 if tensor.dtype == torch.bool else drawn)
            continue
        wide = torch.complex128 if tensor.is_complex() else torch.float64
        noise = torch.randn(target.shape, dtype=wide, generator=generator)
        target.add_(noise.mul_(0.1).to(tensor.dtype))


# Returns the model and the average to go on with: the same objects, or copies of both.
Change = Callable[[nn.Module, Any], tuple[nn.Module, Any]]


def nothing(model: nn.Module, ema: Any) -> tuple[nn.Module, Any]:
    """Go on."""
    return model, ema


def shifted(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor in memory of its own, with other values if they are numbers."""
    copied = tensor.detach().clone()
    if copied.is_floating_point():
        copied.mul_(0.5)
    return copied


def load_assign(model: nn.Module, ema: Any) -> tuple[nn.Module, Any]:
    """Replace all tensors by those of a state dict; tied names stay tied."""
    new: dict[int, Tensor] = {}
    state = model.state_dict(keep_vars=True)
    for name, tensor in state.items():
        if id(tensor) not in new:
            copied = shifted(tensor)
            is_parameter = isinstance(tensor, nn.Parameter)
            new[id(tensor)] = nn.Parameter(copied, tensor.requires_grad) if is_parameter else copied
        state[name] = new[id(tensor)]
    model.load_state_dict(state, assign=True)
    return model, ema


def swap_tensors(model: nn.Module, ema: Any) -> tuple[nn.Module, Any]:
    """Give each tensor object the content of another one."""
    for tensor in tensors(model).values():
        other = shifted(tensor)
        if isinstance(tensor, nn.Parameter):
            other = nn.Parameter(other, tensor.requires_grad)
        torch.utils.swap_tensors(tensor, other)
    return model, ema


def deep_copy(model: nn.Module, ema: Any) -> tuple[nn.Module, Any]:
    """Go on with copies of the model and of its average."""
    copied: tuple[nn.Module, Any] = copy.deepcopy((model, ema))
    return copied


def pickled(model: nn.Module, ema: Any) -> tuple[nn.Module, Any]:
    """Go on with what a pickle of the model and of its average holds."""
    loaded: tuple[nn.Module, Any] = pickle.loads(pickle.dumps((model, ema)))
    return loaded


def data(model: nn.Module, ema: Any) -> tuple[nn.Module, Any]:
    """Give each second tensor other memory, and write to the others, both through ``.data``."""
    for index, tensor in enumerate(tensors(model).values()):
        if index % 2:
            tensor.data = shifted(tensor)
        elif tensor.is_floating_point():
            memory_of(tensor.data).mul_(0.5)
    return model, ema


def requires_grad(model: nn.Module, ema: Any) -> tuple[nn.Module, Any]:
    """Freeze what trains, and train what is frozen."""
    for parameter in model.parameters():
        if parameter.is_floating_point() or parameter.is_complex():
            parameter.requires_grad_(not parameter.requires_grad)
    return model, ema


def cast(model: nn.Module, ema: Any) -> tuple[nn.Module, Any]:
    """Give all floating-point tensors of the model another dtype."""
    model.double()
    if hasattr(model, "center"):
        # Torch makes two buffers of one that has two names.
        model.center = model.mean
    return model, ema


CHANGES: dict[str, Change] = {
    change.__name__: change
    for change in (
        nothing,
        load_assign,
        swap_tensors,
        deep_copy,
        pickled,
        data,
        requires_grad,
        cast,
    )
}


# Returns the average of the models of all updates, the copy first; ``every`` steps lie between two.
Reference = Callable[[list[Tensor], int], Tensor]

SINGLE = torch.finfo(torch.float32).eps


def by_step(decay: Callable[[int], float]) -> Reference:
    """Return the average of ``d * average + (1 - d) * model``, with the decay of each step."""

    def average(models: list[Tensor], every: int) -> Tensor:
        result = models[0]
        for update, model in enumerate(models[1:], 1):
            last = update * every
            d = math.prod(decay(n) for n in range(last - every + 1, last + 1))
            result = d * result + (1 - d) * model
        return result

    return average


def by_update(decay: Callable[[int], float]) -> Reference:
    """Return the same average with one decay for each update, that of its last step."""

    def average(models: list[Tensor], every: int) -> Tensor:
        result = models[0]
        for update, model in enumerate(models[1:], 1):
            d = decay(update * every)
            result = d * result + (1 - d) * model
        return result

    return average


def mean_of_all(models: list[Tensor], every: int) -> Tensor:
    return torch.stack(models).mean(0)


def power_of_time(sigma_rel: float) -> Callable[[int], float]:
    """Return the decay of EDM2, whose exponent is the largest root of a cubic (arXiv 2312.02696)."""
    cubic = [1, 7, 16 - sigma_rel**-2, 12 - sigma_rel**-2]
    gamma = float(np.roots(cubic).real.max())
    return lambda n: (n / (n + 1)) ** (gamma + 1)


def ramp(n: int) -> float:
    """Return a decay that a user may have written; a module's function, so that it can be pickled."""
    return n / (n + 3)


@dataclasses.dataclass(frozen=True)
class Cosine(schedules.Schedule):
    """A schedule of a user, as BYOL has it."""

    base: float = 0.4
    steps: int = 20

    def decay_at(self, n: int) -> float:
        """Return the decay of one step."""
        return 1 - (1 - self.base) * (math.cos(math.pi * min(1, n / self.steps)) + 1) / 2


SCHEDULES: dict[str, tuple[schedules.Schedule, Reference]] = {
    "Constant": (schedules.Constant(0.9), by_step(lambda n: 0.9)),
    "CountWarmup": (schedules.CountWarmup(0.5), by_step(lambda n: min(0.5, (1 + n) / (10 + n)))),
    "InverseGamma": (
        schedules.InverseGamma(power=0.75),
        by_step(lambda n: min(0.9999, 1 - (1 + n) ** -0.75)),
    ),
    "Equal": (schedules.Equal(), mean_of_all),
    "Power": (schedules.Power(0.1), by_step(power_of_time(0.1))),
    "PerUpdate": (
        schedules.PerUpdate(schedules.CountWarmup(0.7)),
        by_update(lambda n: min(0.7, (1 + n) / (10 + n))),
    ),
    "Custom": (schedules.Custom(ramp), by_step(lambda n: n / (n + 3))),
    "subclass": (
        Cosine(),
        by_step(lambda n: 1 - 0.6 * (math.cos(math.pi * min(1, n / 20)) + 1) / 2),
    ),
}


def tolerance(dtype: torch.dtype, precision: str, updates: int) -> float:
    """Return the largest error of an average of values up to 1, by the documented precision.

    Each update rounds to the dtype of the average, by up to half its eps, or by a whole eps where it
    rounds at random.
    """
    eps = torch.finfo(dtype).eps
    narrow = dtype in (torch.bfloat16, torch.float16)
    if precision == "fp64":
        eps = torch.finfo(torch.float64).eps
    elif narrow and precision == "fp32":
        eps = SINGLE
    elif narrow and precision == "stochastic":
        eps *= 2
    return updates * eps / 2
