"""The computation of torch's layers as source code, from ``forward`` or from a table.

A computation stands for the functions of torch that it replaces only as long as they are torch's
own: a patch of one of them is called. So each computation lists what it replaces.
"""

import ast
import inspect
import re
import textwrap
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any, Final, NamedTuple

from torch import nn
from torch.nn import functional as F  # noqa: N812 - torch's layers call it so
from torch.nn.modules.lazy import LazyModuleMixin

from modkit._upstream import original_methods
from modkit.nn._overrides import class_is_standard, methods


# Torch's own call path and access to attributes.
_CALLED_BY_TORCH: Final = methods("__getattr__", "__call__", "_call_impl", "_compiled_call_impl")


class Layer(NamedTuple):
    """The computation of a layer, as source.

    In the source, ``self.name`` is an attribute and ``x`` the input.

    Attributes:
        expression: The result.
        condition: True of the attributes, or torch's own path is taken.
        input_condition: True of the input, or torch's own path is taken.
        functions: Names in ``torch.nn.functional`` that the expression replaces. A patch of one of
            them is called.
        methods: Names of methods that the expression replaces, likewise.
        arguments: Names of the arguments of ``forward``, the first one being ``x``.
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
        source = f"{self.condition} {self.expression} {self.input_condition}"
        return list(dict.fromkeys(re.findall(r"\bself\.(\w+)", source)))


def _of_dimension(n: int) -> dict[type[nn.Module], Layer]:
    """Return the layers that torch has for 1, 2 and 3 dimensions."""
    zeros = "self.padding_mode == 'zeros'"
    inputs = "x, self.weight, self.bias, self.stride, self.padding"
    # None means a cumulative average; in evaluation mode the kernel does not use it.
    momentum = "0.0 if self.momentum is None else self.momentum"
    statistics = "self.running_mean, self.running_var"

    return {
        getattr(nn, f"Conv{n}d"): Layer(
            f"F.conv{n}d({inputs}, self.dilation, self.groups)", zeros, methods=("_conv_forward",)
        ),
        getattr(nn, f"BatchNorm{n}d"): Layer(
            f"torch.batch_norm(x, self.weight, self.bias, {statistics},"
            f" False, {momentum}, self.eps, cudnn)",
            "not self.training and self.running_mean is not None and self.running_var is not None"
            " and self.eps > 0.0",
            f"x.dim() == {n + 2}" + (" or x.dim() == 2" if n == 1 else ""),
            functions=("batch_norm",),
            methods=("_check_input_dim",),
        ),
    }


def _cell(function: str, state: str = "hx.dim() == 2") -> Layer:
    """Return a recurrent cell: a kernel, and the condition for its state.

    A cell without a state, or with inputs that are not batched, takes torch's own path.
    """
    return Layer(
        f"{function}(x, hx, self.weight_ih, self.weight_hh, self.bias_ih, self.bias_hh)",
        input_condition=f"x.dim() == 2 and hx is not None and {state}",
        arguments=("x", "hx"),
    )


def _recurrent(call: str, state: str) -> Layer:
    """Return a recurrent layer, whose kernel gets the arguments in place of ``...``.

    Without a state, with packed sequences and with projections, torch's own path is taken.
    """
    given = "x, hx, self._flat_weights, self.bias, self.num_layers, self.dropout, self.training"
    layers = "self.num_layers * (1 + self.bidirectional)"
    size = f"({layers}, x.size(1 - self.batch_first), self.hidden_size)"

    return Layer(
        call.replace("...", f"{given}, self.bidirectional, self.batch_first"),
        # Torch's ``forward`` first renews its list of weights where one of them was replaced.
        condition="self.proj_size == 0 and"
        " all(map(is_same, self._flat_weights, map(d0.get, self._flat_weights_names)))",
        input_condition="type(x) is torch.Tensor and x.dim() == 3 and x.size(2) == self.input_size"
        f" and x.dtype is self._flat_weights[0].dtype and {state.replace('SIZE', size)}",
        methods=(
            "_update_flat_weights",
            "permute_hidden",
            "check_forward_args",
            "check_input",
            "check_hidden_size",
        ),
        arguments=("x", "hx"),
    )


# Layers whose ``forward`` is more than one expression, or calls a Python function that can be
# skipped. All other layers of torch are read from the source of ``forward``, if that is one
# expression.
_LAYERS: Final[dict[type[nn.Module], Layer]] = {
    **_of_dimension(1),
    **_of_dimension(2),
    **_of_dimension(3),
    nn.GRUCell: _cell("torch.gru_cell"),
    nn.LSTMCell: _cell(
        "torch.lstm_cell", "type(hx) is tuple and len(hx) == 2 and hx[0].dim() == hx[1].dim() == 2"
    ),
    nn.GRU: _recurrent("torch.gru(...)", "type(hx) is torch.Tensor and hx.size() == SIZE"),
    nn.LSTM: _recurrent(
        "(lambda found: (found[0], found[1:]))(torch.lstm(...))",
        "type(hx) is tuple and len(hx) == 2 and hx[0].size() == hx[1].size() == SIZE",
    ),
    nn.LayerNorm: Layer(
        "torch.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps, cudnn)",
        functions=("layer_norm",),
    ),
    nn.GroupNorm: Layer(
        "torch.group_norm(x, self.num_groups, self.weight, self.bias, self.eps, cudnn)",
        # The function refuses a single value per channel; an input of this size has more.
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
        # Modes of ``__torch_function__`` and of dispatch see the call that does nothing.
        condition="self.training is False and 0.0 <= self.p <= 1.0 and self.inplace is not None"
        " and not modes_are_active()",
        # Other layers call a function of torch, which refuses what is not a tensor.
        input_condition="type(x) is torch.Tensor",
        functions=("dropout",),
    ),
}


def _is_of_torch(function: Any) -> bool:
    """Return True if a function is defined in ``torch.nn``, and is not a wrapper."""
    file = function.__code__.co_filename if hasattr(function, "__code__") else ""
    return file.startswith(nn.__path__[0]) and not hasattr(function, "__wrapped__")


# The functions of torch that the table replaces, as they were before any patch.
FUNCTIONS: Final = {
    name: getattr(F, name) for layer in _LAYERS.values() for name in layer.functions
}


class Kind(NamedTuple):
    """The computation of a class, and the functions of the class that it replaces.

    Attributes:
        layer: The computation.
        forward: The ``forward`` of the class, to notice a patch.
        methods: The other methods that the computation replaces, by name.
    """

    layer: Layer
    forward: Callable[..., Any]
    methods: tuple[tuple[str, Callable[..., Any]], ...]


@cache
def _read(forward: Callable[..., Any]) -> Layer | None:
    """Read a computation from the source of ``forward``, if that is one expression.

    This keeps up with the releases of torch: what a layer computes is written there alone.
    """
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
    # The names that the expression may use, and those that the generated source has for them.
    renamed = {itself: "self", first: "x"}
    renamed.update((name, name) for name in (*others, "F", "torch", "float"))
    for node in ast.walk(last.value):
        # A method may do anything, and an override of it must be called.
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith(f"{itself}."):
            return None
        if isinstance(node, ast.Name):
            if node.id not in renamed:
                return None
            node.id = renamed[node.id]
    return Layer(ast.unparse(last.value), arguments=("x", *others))


@lru_cache(maxsize=1024)
def _kind_of(cls: Any) -> Kind | None:
    """Return the computation of a class that has torch's methods."""
    forward: Any = cls.forward
    owner = next(base for base in cls.__mro__ if "forward" in vars(base))
    if owner is nn.Module or issubclass(cls, LazyModuleMixin):
        return None

    # BatchNorm2d inherits ``forward``, so the class of the table need not be its owner.
    listed: Any = next((base for base in cls.__mro__ if base in _LAYERS), None)
    layer = _LAYERS[listed] if listed is not None and listed.forward is forward else _read(forward)
    # A property or a class attribute would not be found in the instance's dict.
    if layer is None or any(hasattr(cls, name) for name in layer.names):
        return None

    methods: Any = tuple((name, getattr(cls, name, None)) for name in layer.methods)
    if not all(_is_of_torch(value) and value is getattr(listed, name) for name, value in methods):
        return None
    if not all(_is_of_torch(FUNCTIONS[name]) for name in layer.functions):
        return None
    return Kind(layer, forward, methods)


def kind_of(cls: Any) -> Kind | None:
    """Return the computation of a class, or None to take torch's own path."""
    # A mock or a proxy that claims to be a module may not have a ``forward``. Both are asked each
    # time, since a patch ends: a profiler's, for instance.
    if not class_is_standard(cls, _CALLED_BY_TORCH) or not _is_of_torch(cls.forward):
        return None
    return _kind_of(cls)


CONTAINER: Final = Kind(Layer("x"), nn.Sequential.forward, (("__iter__", nn.Sequential.__iter__),))


def is_container(cls: Any) -> bool:
    """Return True if modules of a class pass their input through their children, one by one."""
    functions = [("forward", CONTAINER.forward), *CONTAINER.methods]
    same = all(getattr(cls, name, None) is function for name, function in functions)
    return same and _is_of_torch(CONTAINER.forward) and class_is_standard(cls, _CALLED_BY_TORCH)


def has_own_forward(cls: Any) -> bool:
    """Return True if a class implements ``forward``, and leaves to torch how it is called."""
    has_forward = getattr(cls, "forward", None) is not original_methods["forward"]
    return has_forward and class_is_standard(cls, _CALLED_BY_TORCH)
