"""What torch's layers compute, as source: from the source of ``forward``, or from a table."""

import ast
import inspect
import re
import textwrap
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any, Final, NamedTuple, cast

from torch import nn
from torch.nn import functional as F  # noqa: N812 - torch's layers call it so

from modkit._upstream import original_methods


CALL: Final = original_methods["__call__"]
CALL_IMPL: Final = original_methods["_call_impl"]
_GETATTR: Final = original_methods["__getattr__"]


class Layer(NamedTuple):
    """The computation of a layer. In the source, ``self.name`` is an attribute and ``x`` the input.

    Args:
        expression: The result.
        condition: What must hold of the attributes, or torch's own path is taken.
        input_condition: What must hold of the input, or torch's own path is taken.
        functions: The names in ``torch.nn.functional`` that the expression does without.
        methods: The names of methods that it does without.
        arguments: The names of the arguments of ``forward``, the first one being ``x``.
    """

    expression: str
    condition: str = ""
    input_condition: str = ""
    functions: tuple[str, ...] = ()
    methods: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ("x",)

    @property
    def names(self) -> list[str]:
        """The names of the attributes."""
        texts = f"{self.condition} {self.expression} {self.input_condition}"
        return list(dict.fromkeys(re.findall(r"\bself\.(\w+)", texts)))


def _convolution(dimensions: int) -> Layer:
    return Layer(
        f"F.conv{dimensions}d(x, self.weight, self.bias, self.stride, self.padding, self.dilation,"
        " self.groups)",
        condition="self.padding_mode == 'zeros'",
        methods=("_conv_forward",),
    )


def _transposed_convolution(dimensions: int) -> Layer:
    return Layer(
        f"F.conv_transpose{dimensions}d(x, self.weight, self.bias, self.stride, self.padding,"
        " self.output_padding, self.groups, self.dilation)",
        condition="self.padding_mode == 'zeros' and type(self.padding) is tuple"
        " and type(self.output_padding) is tuple",
        methods=("_output_padding",),
    )


def _batch_norm(input_condition: str) -> Layer:
    return Layer(
        "torch.batch_norm(x, self.weight, self.bias, self.running_mean, self.running_var, False,"
        " 0.0 if self.momentum is None else self.momentum, self.eps, cudnn)",
        condition="not self.training and self.running_mean is not None"
        " and self.running_var is not None and self.eps >= 0.0",
        input_condition=input_condition,
        functions=("batch_norm",),
        methods=("_check_input_dim",),
    )


def _instance_norm(dimensions: int) -> Layer:
    return Layer(
        "F.instance_norm(x, self.running_mean, self.running_var, self.weight, self.bias,"
        " self.training or not self.track_running_stats,"
        " 0.0 if self.momentum is None else self.momentum, self.eps)",
        input_condition=f"x.dim() == {dimensions + 2} and x.size(1) == self.num_features",
        methods=("_check_input_dim", "_get_no_batch_dim", "_apply_instance_norm"),
    )


# Layers whose ``forward`` is more than an expression, or calls a function in Python that can be skipped.
# Every other layer of torch whose ``forward`` is one expression is read from its source.
_LAYERS: Final[dict[type[nn.Module], Layer]] = {
    nn.Conv1d: _convolution(1),
    nn.Conv2d: _convolution(2),
    nn.Conv3d: _convolution(3),
    nn.ConvTranspose1d: _transposed_convolution(1),
    nn.ConvTranspose2d: _transposed_convolution(2),
    nn.ConvTranspose3d: _transposed_convolution(3),
    nn.BatchNorm1d: _batch_norm("2 <= x.dim() <= 3"),
    nn.BatchNorm2d: _batch_norm("x.dim() == 4"),
    nn.BatchNorm3d: _batch_norm("x.dim() == 5"),
    nn.InstanceNorm1d: _instance_norm(1),
    nn.InstanceNorm2d: _instance_norm(2),
    nn.InstanceNorm3d: _instance_norm(3),
    nn.LayerNorm: Layer(
        "torch.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps, cudnn)",
        functions=("layer_norm",),
    ),
    nn.GroupNorm: Layer(
        "torch.group_norm(x, self.num_groups, self.weight, self.bias, self.eps, cudnn)",
        # The function refuses a single value per channel. There are more in an input of this size.
        input_condition="x.dim() >= 2 and x.numel() > 2 * self.num_groups",
        functions=("group_norm",),
    ),
    nn.Embedding: Layer(
        "torch.embedding(self.weight, x, -1, self.scale_grad_by_freq, self.sparse)",
        condition="self.padding_idx is None and self.max_norm is None",
        functions=("embedding",),
    ),
    nn.ReLU: Layer("torch.relu_(x) if self.inplace else torch.relu(x)", functions=("relu",)),
    nn.Softmax: Layer(
        "x.softmax(self.dim)", condition="self.dim is not None", functions=("softmax",)
    ),
    nn.Dropout: Layer(
        "x",
        condition="not self.training and 0.0 <= self.p <= 1.0 and not modes_are_active()",
        functions=("dropout",),
    ),
}


def _is_of_torch(function: Any) -> bool:
    """Return True if a function is the one that ``torch.nn`` has defined, not a wrapper of it."""
    file = function.__code__.co_filename if hasattr(function, "__code__") else ""
    return file.startswith(nn.__path__[0]) and not hasattr(function, "__wrapped__")


FUNCTIONS: Final = {name: getattr(F, name) for one in _LAYERS.values() for name in one.functions}


class Kind(NamedTuple):
    """What modules of a class compute, and the functions of the class that this stands for."""

    layer: Layer
    forward: Callable[..., Any]
    methods: tuple[tuple[str, Callable[..., Any]], ...]


@cache
def _read(forward: Callable[..., Any]) -> Layer | None:
    """Read a computation from the source of ``forward``, where that is one expression."""
    try:
        definition: Any = ast.parse(textwrap.dedent(inspect.getsource(forward))).body[0]
    except (OSError, SyntaxError):
        return None
    *before, last = definition.body
    arguments = definition.args
    only_text = all(isinstance(getattr(line, "value", None), ast.Constant) for line in before)
    plain = not (arguments.vararg or arguments.kwarg or arguments.kwonlyargs or arguments.defaults)
    if not only_text or not plain or not isinstance(last, ast.Return) or last.value is None:
        return None
    itself, first, *others = (argument.arg for argument in arguments.args)
    known = {itself: "self", first: "x"}
    known.update((name, name) for name in (*others, "F", "torch", "float"))
    for node in ast.walk(last.value):
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith(f"{itself}."):
            return None
        if isinstance(node, ast.Name):
            if node.id not in known:
                return None
            node.id = known[node.id]
    return Layer(ast.unparse(last.value), arguments=("x", *others))


@lru_cache(maxsize=1024)
def _kind_of(cls: Any) -> Kind | None:
    """Return what modules of a class compute, or None to take torch's own path."""
    forward: Any = cls.forward
    owner = next(base for base in cls.__mro__ if "forward" in vars(base))
    is_lazy = issubclass(cls, nn.modules.lazy.LazyModuleMixin)
    if owner is nn.Module or is_lazy or not _is_of_torch(forward) or not is_standard(cls):
        return None
    # BatchNorm2d inherits ``forward``, so the class of the table need not be its owner.
    known: Any = next((base for base in cls.__mro__ if base in _LAYERS), None)
    layer = _LAYERS[known] if known is not None and known.forward is forward else _read(forward)
    if layer is None or any(hasattr(cls, name) for name in layer.names):
        return None
    methods = tuple((name, getattr(cls, name)) for name in layer.methods)
    if not all(_is_of_torch(value) and value is getattr(known, name) for name, value in methods):
        return None
    if not all(_is_of_torch(FUNCTIONS[name]) for name in layer.functions):
        return None
    return Kind(layer, forward, methods)


kind_of: Final = cast("Callable[[type], Kind | None]", _kind_of)
CONTAINER: Final = Kind(Layer("x"), nn.Sequential.forward, (("__iter__", nn.Sequential.__iter__),))


def is_container(cls: Any) -> bool:
    """Return True if modules of a class pass their input through their children, one by one."""
    functions = [("forward", CONTAINER.forward), *CONTAINER.methods]
    same = all(getattr(cls, name, None) is function for name, function in functions)
    return same and _is_of_torch(CONTAINER.forward) and is_standard(cls)


def is_standard(cls: Any) -> bool:
    """Return True if modules of a class are called, and their members found, as torch does it."""
    return cls.__call__ is CALL and cls._call_impl is CALL_IMPL and finds_members_as_torch(cls)


def finds_members_as_torch(cls: Any) -> bool:
    """Return True if a class neither has a ``__getattr__`` of its own nor a ``__getattribute__``."""
    return cls.__getattr__ is _GETATTR and cls.__getattribute__ is object.__getattribute__
