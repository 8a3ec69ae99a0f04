"""Build a user's model on torch and on modkit, each in its own process, and compare the two.

Two processes, because a package that is imported twice in one registers its operators twice.
"""

import copy
import importlib
import io
import logging
import multiprocessing
import os
import pickle
import re
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection
from operator import attrgetter
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple
from unittest import mock

import torch
from torch import Tensor

import modkit.nn
from modkit.compat.outcomes import Library, Outcome, leaves, outcome, seed
from modkit.compat.run import NOT_COMPARED, Result
from modkit.compat.swapped_imports import UNTOUCHED, SwappedImports, untouched


_SHAPE: Final = re.compile(r"\d+(,\d+)*")
# Attributes of layers that have the number of features, or channels, of the input.
_SIZES: Final = ("in_features", "in_channels", "num_features", "input_size")
_LOADING: Final = "loading the state dict of the other"
Inputs = tuple[Sequence[Any], Mapping[str, Any]]


class TargetError(Exception):
    """The target or an option beside it is wrong."""


class Target(NamedTuple):
    """A model to build: the arguments of ``modkit compat``.

    Attributes:
        path: ``package.module:Class`` or ``path/to/script.py:factory``.
        inputs: Shapes such as ``1,3,224,224``, or one path to a function that returns inputs.
        swap: Packages to rewrite besides that of ``path``.
    """

    path: str
    inputs: Sequence[str] = ()
    swap: Sequence[str] = ()


def packages_of(target: Target) -> set[str]:
    """Return the names of the packages that are rewritten on modkit's side."""
    home = target.path.rpartition(":")[0]
    package = Path(home).stem if home.endswith(".py") else home.partition(".")[0]
    return {package, *target.swap}


def object_at(path: str) -> Any:
    """Import a class or function from a package or script."""
    home, _, name = path.rpartition(":")
    if not home or not name:
        raise TargetError(f"{path!r} is neither package.module:Class nor path/to/script.py:factory")

    folder = Path.cwd()
    if home.endswith(".py"):
        if not Path(home).is_file():
            raise TargetError(f"there is no file {home}")
        script = Path(home).resolve()
        folder, home = script.parent, script.stem

    # As Python does for a script: it may import files beside it.
    sys.path.insert(0, str(folder))
    try:
        module = importlib.import_module(home)
    except ModuleNotFoundError as error:
        # A module that the user's code lacks is an error of that code.
        if f"{home}.".startswith(f"{error.name}."):
            raise TargetError(f"there is no module {error.name}") from error
        raise

    try:
        target: Any = attrgetter(name)(module)
    except AttributeError as error:
        raise TargetError(f"{home} has no {name}") from error
    if not callable(target):
        raise TargetError(f"{path} is not callable")
    return target


def build(target: Target) -> torch.nn.Module:
    """Build the model with a fixed seed."""
    make = object_at(target.path)
    seed()
    model = make()
    if not isinstance(model, torch.nn.Module):
        raise TargetError(f"{target.path} returns a {type(model).__name__}, which is not a module")
    return model


def inputs_of(target: Target, model: torch.nn.Module) -> Inputs | None:
    """Return the inputs of a model: the user's, or some for its first layers."""
    # Not the seed of the model: the inputs would repeat the random numbers of its first weights.
    seed(1)
    if target.inputs and all(map(_SHAPE.fullmatch, target.inputs)):
        return [torch.randn([int(n) for n in shape.split(",")]) for shape in target.inputs], {}
    if len(target.inputs) > 1:
        raise TargetError("--input takes several shapes, or one function that returns all inputs")
    if target.inputs:
        made = object_at(target.inputs[0])()
        if isinstance(made, Mapping):
            return (), made
        return made if isinstance(made, (list, tuple)) else (made,), {}

    for layer in model.modules():
        if isinstance(layer, torch.nn.Embedding):
            return (torch.randint(layer.num_embeddings, (2, 8)),), {}
        for size in (getattr(layer, name, None) for name in _SIZES):
            if isinstance(size, int):
                # Conv2d and its like take two more dimensions.
                rank = re.search(r"([123])d$", type(layer).__name__)
                return (torch.randn(2, size, *[32] * int(rank[1] if rank else 0)),), {}
    return None


def _described(inputs: Inputs | None) -> str:
    """Return types and shapes of inputs."""

    def described(value: Any) -> str:
        if isinstance(value, Tensor):
            return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
        return type(value).__name__

    args, kwargs = inputs or ((), {})
    words = [described(value) for value in args]
    words += [f"{name}={described(value)}" for name, value in kwargs.items()]
    return ", ".join(words) or "nothing"


def checks(model: torch.nn.Module, inputs: Inputs | None) -> dict[str, Callable[[], Any] | None]:
    """Return the functions whose outcomes are compared."""
    args, kwargs = inputs or ((), {})

    def call(module: Any) -> Any:
        return module(*args, **kwargs)

    def trained() -> Any:
        # A copy, so that the checks after this one get the initial weights.
        net = copy.deepcopy(model).train()
        outputs = leaves(call(net))
        # The model's own loss is not known; any scalar that depends on all outputs gives gradients.
        losses = [t.abs().sum() for t in outputs if isinstance(t, Tensor) and t.requires_grad]
        # Outputs such as indices have no gradients.
        if losses:
            torch.stack(losses).sum().backward()
        return outputs, net

    def traced() -> Any:
        graph = torch.fx.symbolic_trace(model)
        return graph.code, call(graph)

    def exported() -> Any:
        program = torch.export.export(model, tuple(args), dict(kwargs))
        return str(program.graph), list(program.state_dict), call(program.module())

    # The names are those of the report.
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
        # The attributes are the versions of modules, in _metadata.
        "state dict": lambda: [model.state_dict(), vars(model.state_dict())],
        "deepcopy": lambda: copy.deepcopy(model),
        "pickle": lambda: pickle.loads(pickle.dumps(model)),  # noqa: S301 - written in this line
        **{name: function if inputs else None for name, function in forward.items()},
    }


def _checked(function: Callable[[], Any] | None) -> Outcome:
    """Run one check. Only the first line of an error counts: others show frames of Python."""
    if function is None:
        return "skipped", "no --input, and the first layers do not say which shape they take", []
    seed()
    # Warnings are left out: they name lines of the library.
    kind, *rest, _ = outcome(function)
    if kind == "raises":
        rest = [line.partition("\n")[0] for line in rest]
    return kind, *rest, []


def _counted(model: torch.nn.Module, base: type) -> str:
    """Say how many modules, and how many classes of the user, derive from modkit's Module."""
    classes = [type(module) for module in model.modules()]
    of_user = {cls for cls in classes if cls.__module__.partition(".")[0] != "torch"}
    still_torch = sorted(
        f"{cls.__module__}.{cls.__qualname__}" for cls in of_user if base not in cls.__mro__
    )
    derived = sum(base in cls.__mro__ for cls in classes)
    lines = [f"{len(classes)} modules, {derived} of modkit's Module"]
    if of_user:
        rebased = len(of_user) - len(still_torch)
        lines.append(f"{rebased} of {len(of_user)} classes outside of torch")
    if still_torch:
        lines.append(f"still torch's: {', '.join(still_torch)}")
    return "; ".join(lines)


def side(connection: Connection, name: Literal["torch", "modkit"], target: Target) -> None:
    """Build and check the model for one library, then load the state dict that is received.

    This is the main function of a process. It sends the name of each check as it begins, and then
    the number of modules, the outcomes and the state dict; or an exception. After it has received
    the state dict of the other side, it sends the outcome of loading that.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The command line ends this process.
    os.dup2(2, 1)  # Output of the user's code is not part of the report.
    # The report has the error of a check; the compiler also logs it, with its frames.
    logging.getLogger("torch").setLevel(logging.CRITICAL)
    swapped: list[str] = []
    if name == "modkit":
        SwappedImports(packages_of(target), report=swapped.append).install()
    try:
        model = build(target)
        inputs = inputs_of(target, model)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the user's code may raise anything
        reason = f"the model cannot be built on {name}: {type(error).__name__}: {error}"
        # An exception of the user's code need not survive a pickle, so only its text is sent.
        connection.send(error if isinstance(error, TargetError) else RuntimeError(reason))
        return
    if name == "torch" and any(modkit.nn.Module in type(m).__mro__ for m in model.modules()):
        reason = "uses modkit already, and would be compared with itself: give the code on torch.nn"
        connection.send(TargetError(f"{target.path} {reason}"))
        return
    if name == "modkit" and (unused := untouched(target.swap, swapped)):
        connection.send(TargetError(f"--swap {unused[0]}: {UNTOUCHED}"))
        return

    modules = _counted(model, Library(name).nn.Module)
    outcomes: dict[str, Outcome] = {}
    for check, function in checks(model, inputs).items():
        connection.send(check)
        outcomes[check] = _checked(function)
    file = io.BytesIO()
    # After the checks, one of which sets evaluation mode; none has changed a parameter.
    torch.save(model.state_dict(), file)

    made = "" if target.inputs or inputs is None else ", made for its first layers"
    title = f"{modules}; called with {_described(inputs)}{made}"
    connection.send((title, outcomes, file.getvalue()))

    # Extra state may be any object, and the bytes come from the other process of this command.
    state = torch.load(io.BytesIO(connection.recv_bytes()), weights_only=False)
    connection.send(_checked(lambda: [str(model.load_state_dict(state)), model.state_dict()]))


def compare(
    target: Target, progress: Callable[[str], object] = lambda check: None
) -> tuple[str, list[Result]]:
    """Build the model on torch and on modkit, and compare."""
    # Not forked: a new process has imported nothing of the user's.
    context = multiprocessing.get_context("spawn")
    connections: list[Connection] = []
    # Sets of strings have the same order in both processes.
    with ExitStack() as stack, mock.patch.dict(os.environ, PYTHONHASHSEED="0"):
        for name in ("torch", "modkit"):
            ours, theirs = context.Pipe()
            connections.append(ours)
            process = context.Process(target=side, args=(theirs, name, target))
            process.start()
            # Callbacks run in reverse order: the process is terminated, and then waited for.
            stack.callback(process.join)
            stack.callback(process.terminate)
            # With one end open here, an ended process would not end the reading.
            theirs.close()

        of_torch, of_modkit = connections
        try:
            first = _received(of_torch, progress)
            if isinstance(first, Exception):
                raise first
            # Both processes run at once, so only torch's side shows its progress.
            second = _received(of_modkit)
            if isinstance(second, TargetError):
                raise second
            if isinstance(second, Exception):
                built: Outcome = ("returns", "a model", [])
                failed: Outcome = ("raises", str(second), [])
                return target.path, [Result("model", "construction", "unlisted", built, failed)]

            _, left, left_state = first
            count, right, right_state = second
            of_torch.send_bytes(right_state)
            of_modkit.send_bytes(left_state)
            left[_LOADING] = of_torch.recv()
            right[_LOADING] = of_modkit.recv()
        except EOFError:
            raise RuntimeError("the process that ran the model ended early") from None

    results = [_result(check, left[check], right[check]) for check in left]
    return f"{target.path}: {count}", results


def _received(
    connection: Connection, progress: Callable[[str], object] = lambda check: None
) -> Any:
    """Receive what a side has to say after the names of its checks."""
    while True:
        message = connection.recv()
        if not isinstance(message, str):
            return message
        progress(message)


def _result(check: str, left: Outcome, right: Outcome) -> Result:
    """Compare two outcomes; equal errors, and checks without inputs, have compared nothing."""
    kind = "equal" if left == right else "unlisted"
    if kind == "equal" and left[0] in {"raises", "skipped"}:
        kind = NOT_COMPARED
    return Result("model", check, kind, left, right)
