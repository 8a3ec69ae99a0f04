"""Build a user's model on torch and on modkit, each in its own process, and compare the two."""

import copy
import importlib.util
import io
import multiprocessing
import os
import pickle
import re
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from multiprocessing.connection import Connection
from operator import attrgetter
from pathlib import Path
from types import CodeType
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import Tensor

from modkit.compat.outcomes import Library, Outcome, leaves, outcome
from modkit.compat.run import NOT_COMPARED, Result
from modkit.compat.swap import swap_source


_SHAPE: Final = re.compile(r"\d+(,\d+)*")
_SIZES: Final = ("in_features", "in_channels", "num_features", "input_size")
_LOADING: Final = "loading the state dict of the other"
Inputs = tuple[Sequence[Any], Mapping[str, Any]]


class TargetError(Exception):
    """The target or an option beside it is wrong."""


class Target(NamedTuple):
    """A model to build: the arguments of ``modkit compat``."""

    path: str
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] | None = None
    inputs: Sequence[str] = ()
    swap: Sequence[str] = ()


class _Loader(SourceFileLoader):
    """Compiles the rewritten source; cached bytecode is that of the original source."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        source = importlib.util.decode_source(self.get_data(path))
        code: CodeType = compile(swap_source(source), path, "exec", dont_inherit=True)
        return code


class Swap(MetaPathFinder):
    """Imports the packages of a target with modkit in place of ``torch.nn``."""

    def __init__(self, target: Target) -> None:
        home = target.path.rpartition(":")[0]
        package = Path(home).stem if home.endswith(".py") else home.partition(".")[0]
        # Both sides run on torch, whose layers are also modkit's.
        self._packages = {package, *target.swap} - {"torch", "modkit"}

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        """Return the spec of a source file in one of the packages."""
        if not any(f"{fullname}.".startswith(f"{package}.") for package in self._packages):
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and type(spec.loader) is SourceFileLoader:
            spec.loader = _Loader(fullname, spec.loader.path)
        return spec


def _found_at(path: str) -> Any:
    home, _, name = path.rpartition(":")
    if not home or not name:
        raise TargetError(f"{path!r} is neither package.module:Class nor path/to/script.py:factory")
    folder = Path.cwd()
    if home.endswith(".py"):
        if not Path(home).is_file():
            raise TargetError(f"there is no file {home}")
        folder, home = Path(home).resolve().parent, Path(home).stem
    sys.path.insert(0, str(folder))
    try:
        module = importlib.import_module(home)
    except ModuleNotFoundError as error:
        if f"{home}.".startswith(f"{error.name}."):
            raise TargetError(f"there is no module {error.name}") from error
        raise
    try:
        found: Any = attrgetter(name)(module)
    except AttributeError as error:
        raise TargetError(f"{home} has no {name}") from error
    if not callable(found):
        raise TargetError(f"{path} is not callable")
    return found


def build(target: Target) -> torch.nn.Module:
    """Build the model with a fixed seed."""
    make = _found_at(target.path)
    torch.manual_seed(0)
    model = make(*target.args, **(target.kwargs or {}))
    if not isinstance(model, torch.nn.Module):
        raise TargetError(f"{target.path} returns a {type(model).__name__}, which is not a module")
    return model


def inputs_of(target: Target, model: torch.nn.Module) -> Inputs | None:
    """Return positional and keyword inputs, or None if the layers do not tell their shape."""
    torch.manual_seed(1)
    if target.inputs and all(map(_SHAPE.fullmatch, target.inputs)):
        return [torch.randn([int(n) for n in text.split(",")]) for text in target.inputs], {}
    if target.inputs:
        made = _found_at(target.inputs[0])()
        if isinstance(made, Mapping):
            return (), made
        return made if isinstance(made, (list, tuple)) else (made,), {}
    for layer in model.modules():
        if isinstance(layer, torch.nn.Embedding):
            return (torch.randint(layer.num_embeddings, (2, 8)),), {}
        for size in (getattr(layer, name, None) for name in _SIZES):
            if isinstance(size, int):
                rank = re.search(r"([123])d$", type(layer).__name__)
                return (torch.randn(2, size, *[32] * int(rank[1] if rank else 0)),), {}
    return None


def _described(inputs: Inputs | None) -> str:
    """Return types and shapes of inputs."""
    args, kwargs = inputs or ((), {})
    named = [*(("", each) for each in args), *((f"{name}=", each) for name, each in kwargs.items())]
    texts = [
        f"{name}{str(each.dtype)[6:]} {tuple(each.shape)}"
        if isinstance(each, Tensor)
        else f"{name}{type(each).__name__}"
        for name, each in named
    ]
    return ", ".join(texts) or "nothing"


def checks(model: torch.nn.Module, inputs: Inputs | None) -> dict[str, Callable[[], Any] | None]:
    """Return the functions whose outcomes are compared; None is skipped."""
    args, kwargs = inputs or ((), {})

    def call(module: Any) -> Any:
        return module(*args, **kwargs)

    def trained() -> Any:
        net = copy.deepcopy(model).train()
        found = leaves(call(net))
        losses = [t.abs().sum() for t in found if isinstance(t, Tensor) and t.requires_grad]
        torch.stack(losses).sum().backward()
        return found, net

    def traced() -> Any:
        found = torch.fx.symbolic_trace(model)
        return found.code, call(found)

    def exported() -> Any:
        program = torch.export.export(model, tuple(args), dict(kwargs))
        return str(program.graph), list(program.state_dict), call(program.module())

    forward = {
        "output in evaluation mode": lambda: call(model.eval()),
        "output, gradients and buffers in training mode": trained,
        'torch.compile(backend="eager")': lambda: call(torch.compile(model, backend="eager")),
        "torch.fx.symbolic_trace": traced,
        "torch.export": exported,
    }
    return {
        "structure": lambda: [(n, type(m)) for n, m in model.named_modules(remove_duplicate=False)],
        "text": lambda: repr(model),
        "initial bits": lambda: [*model.named_parameters(), *model.named_buffers()],
        "state dict": lambda: [model.state_dict(), vars(model.state_dict())],
        "deepcopy": lambda: copy.deepcopy(model),
        "pickle": lambda: pickle.loads(pickle.dumps(model)),  # noqa: S301 - written in this line
        **{name: function if inputs else None for name, function in forward.items()},
    }


def _checked(function: Callable[[], Any] | None) -> Outcome:
    """Run one check. Only the first line of an error counts: others show frames of Python."""
    if function is None:
        return "skipped", "no --input, and the first layers do not say which shape they take", []
    kind, *rest, _ = outcome(function)
    return kind, *(each.partition("\n")[0] if kind == "raises" else each for each in rest), []


def side(connection: Connection, name: Literal["torch", "modkit"], target: Target) -> None:
    """Build and check the model for one library, then load the state dict that is received."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The command line ends this process.
    os.dup2(2, 1)  # Output of the user's code is not part of the report.
    if name == "modkit":
        sys.meta_path.insert(0, Swap(target))
    try:
        model = build(target)
        inputs = inputs_of(target, model)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the user's code may raise anything
        text = f"the model cannot be built on {name}: {type(error).__name__}: {error}"
        connection.send(error if isinstance(error, TargetError) else RuntimeError(text))
        return
    base = Library(name).nn.Module
    classes = [type(each).__mro__ for each in model.modules()]
    found = {each: _checked(function) for each, function in checks(model, inputs).items()}
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    count = f"{len(classes)} modules, {sum(base in each for each in classes)} of modkit's Module"
    made = "" if target.inputs or inputs is None else ", made for its first layers"
    count = f"{count}; called with {_described(inputs)}{made}"
    connection.send((count, found, file.getvalue()))
    state = torch.load(io.BytesIO(connection.recv_bytes()), weights_only=False)
    connection.send(_checked(lambda: [str(model.load_state_dict(state)), model.state_dict()]))


def compare(target: Target) -> tuple[str, list[Result]]:
    """Build the model on torch and on modkit, and return a title and the results."""
    # In one process, a package that is imported twice would register its operators twice.
    context = multiprocessing.get_context("spawn")
    connections: list[Connection] = []
    with ExitStack() as stack:
        for name in ("torch", "modkit"):
            ours, theirs = context.Pipe()
            connections.append(ours)
            process = context.Process(target=side, args=(theirs, name, target))
            process.start()
            stack.callback(process.join)
            stack.callback(process.terminate)
            theirs.close()
        one, other = connections
        try:
            if isinstance(first := one.recv(), Exception):
                raise first
            if isinstance(second := other.recv(), Exception):
                built: Outcome = ("returns", "a model", [])
                failed: Outcome = ("raises", str(second), [])
                return target.path, [Result("model", "construction", "unlisted", built, failed)]
            (_, left, left_state), (count, right, right_state) = first, second
            one.send_bytes(right_state)
            other.send_bytes(left_state)
            left[_LOADING], right[_LOADING] = one.recv(), other.recv()
        except EOFError:
            raise RuntimeError("the process that ran the model ended early") from None
    results = [_result(check, left[check], right[check]) for check in left]
    return f"{target.path}: {count}", results


def _result(check: str, left: Outcome, right: Outcome) -> Result:
    kind = "equal" if left == right else "unlisted"
    if kind == "equal" and left[0] == "raises":
        kind = NOT_COMPARED
    return Result("model", check, kind, left, right)


def failed(results: Sequence[Result]) -> bool:
    """Return True if a check differs, or the model could not be called or loaded on either side.

    ``torch.compile``, ``torch.fx`` and ``torch.export`` refuse many models, which is not a failure.
    """
    kinds = {each.case: each.kind for each in results}
    needed = [kind for check, kind in kinds.items() if not check.startswith("torch.")]
    return "unlisted" in kinds.values() or NOT_COMPARED in needed
