"""Models with unusual tensors, and a random walk of all their tensors."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from modkit import nn


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
    """A parameter of integers, which does not train."""
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
