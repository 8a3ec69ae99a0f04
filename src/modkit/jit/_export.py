"""A program of torch.export beside the TorchScript, in one file.

TorchScript is not developed further. An archive that holds the same model as a program of torch.export
can still be read when it is gone; until then torch, C++ and modkit read the archive as before.
"""

import io
import os
import shutil
import types
import warnings
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.passes import move_to_device_pass
from torch.jit import ScriptFunction

from modkit.errors import ConversionError
from modkit.files.atomic_write import atomic_write
from modkit.files.zip_check import Archive, Source, opened
from modkit.jit._archive_seal import EXTRA, add_files
from modkit.jit._upstream import CompilationUnit, convert_script, import_module_from_buffer
from modkit.jit._wrap import make_parameters, wrap_cpp
from modkit.jit.script_module import ScriptModule


EXPORT: Final = "export.pt2"


def to_export(
    module: "torch.nn.Module | ScriptFunction[Any, Any]",
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    rtol: float | None = None,
    atol: float | None = None,
) -> ExportedProgram:
    """Turn a module, compiled by TorchScript or not, into a program of torch.export.

    The program is run with ``args`` beside the module, so what is returned computes the same there. For
    other shapes, and for other sides of branches, nobody has looked.

    Args:
        module: A ScriptModule, a ScriptFunction, or a plain module.
        args: Inputs to run it with; dimensions take their sizes.
        kwargs: Further inputs by name; TorchScript takes none.
        rtol: Relative tolerance of the comparison, with ``atol``; by default that of
            ``torch.testing.assert_close`` for the dtype.
        atol: Absolute tolerance.

    Raises:
        ConversionError: It cannot be converted; the error has the node that stops it, and where that
            comes from in the source. Or the results differ.
        TypeError: ``args`` is no tuple, or there are ``kwargs`` for a ScriptModule.

    Example:
        >>> import torch
        >>> import modkit.nn as nn
        >>> program = to_export(nn.Linear(2, 3), (torch.ones(1, 2),))
        >>> program.module()(torch.ones(1, 2)).shape
        torch.Size([1, 3])

    Not in torch.
    """
    if not isinstance(cast("object", args), tuple):
        raise TypeError(f"to_export: args has to be a tuple of inputs, not {type(args).__name__}")
    kwargs = dict(kwargs or {})
    if isinstance(module, (ScriptFunction, torch.jit.ScriptModule)):
        if isinstance(module, torch.jit.ScriptModule) and not hasattr(module, "_c"):
            raise ConversionError(
                f"to_export: {type(module).__name__} is not compiled, as PYTORCH_JIT=0 turns TorchScript "
                "off, and torch.export takes no class that is derived from ScriptModule"
            )
        if kwargs:
            raise TypeError("to_export: a ScriptModule is converted with args only, not kwargs")
        module = _reloaded(module)
        program = _converted(module, args)
    else:
        program = torch.export.export(module, args, kwargs)
    _compare(program, module, args, kwargs, rtol, atol)
    return program


def export_files(program: ExportedProgram) -> dict[str, bytes]:
    """Return the extra file of an archive that holds the program."""
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    return {EXPORT: buffer.getvalue()}


def add_export(path: str | os.PathLike[str], program: ExportedProgram) -> None:
    """Put a program into an archive that is there already; the file is replaced in one step.

    Raises:
        ValueError: The archive has one.
    """
    # What a link leads to is replaced, not the link.
    with atomic_write(Path(path).resolve()) as unfinished:
        shutil.copy(path, unfinished)
        add_files(unfinished, export_files(program))


def read_export(f: Source) -> ExportedProgram:
    """Read the program that stands beside the TorchScript; the latter is not looked at.

    Args:
        f: A path, the content of an archive, or a file that is open for reading.

    Raises:
        KeyError: The archive has no such program.
        FileError: It is damaged.
    """
    with opened(f) as (file, what):
        archive = Archive(file, what)
        name = f"{EXTRA}{EXPORT}"
        if name not in archive.members:
            raise KeyError(f"{what} has no extra file {EXPORT!r}: it was saved without export_args")
        archive.verify(name)
        data = b"".join(archive.chunks(name))
    return torch.export.load(io.BytesIO(data))


def load_export(
    f: Source, device: torch.device | None, files: MutableMapping[str, Any] | None
) -> torch.nn.Module:
    """Return the module of the program beside the TorchScript, for those who load the archive.

    Args:
        f: The archive, which has been checked.
        device: Where the tensors go; None for where they were.
        files: The extra files that are wanted, and are there; their content is filled in.
    """
    program = read_export(f)
    if device is not None:
        program = move_to_device_pass(program, device)
    module = program.module()
    # The mode is part of a program; torch refuses to set even that which it has.
    module.eval = types.MethodType(_as_it_is, module)  # type: ignore[method-assign]
    if files is not None:
        with opened(f) as (file, what):
            archive = Archive(file, what)
            for name in tuple(files):
                files[name] = b"".join(archive.chunks(f"{EXTRA}{name}"))
    return module


def _as_it_is(module: Any) -> Any:
    """Return the module."""
    return module


def _reloaded(module: Any) -> Any:
    """Return a second object from the same code: the conversion rewrites the graph it is given."""
    cpp = import_module_from_buffer(CompilationUnit(), module.save_to_buffer(), None, {}, False)
    reloaded = wrap_cpp(ScriptModule, cpp)
    make_parameters(reloaded)
    return reloaded


def _converted(module: Any, args: tuple[Any, ...]) -> ExportedProgram:
    try:
        with warnings.catch_warnings():
            # Weights that the program does not use are put into it all the same, as they should.
            warnings.filterwarnings("ignore", message="Manually populate")
            # Checks of a number of dimensions become branches that are known beforehand.
            warnings.filterwarnings("ignore", message="Pred is a Python constant")
            return convert_script(module, args)
    except Exception as error:
        chain = _causes(error)
        node = _node_of(chain)
        reason = str(chain[-1]).strip().partition("\n")[0]
        if getattr(module, "training", False):
            reason += " (the module is in training mode; eval() leaves less to convert)"
        if node is None:
            raise ConversionError(
                f"to_export: the module cannot be converted, and no single node is to blame: {reason}"
            ) from error
        kind, source = node
        raise ConversionError(
            f"to_export: {kind} cannot be converted: {reason}\n{source}", kind, source
        ) from error


def _causes(error: BaseException) -> list[BaseException]:
    chain: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in chain:
        chain.append(cause)
        cause = cause.__cause__ or cause.__context__
    return chain


def _node_of(chain: list[BaseException]) -> tuple[str, str] | None:
    """Find the innermost node that the converter was at: its kind, and the place in the source."""
    found: tuple[str, str] | None = None
    for each in chain:
        trace = each.__traceback__
        while trace is not None:
            node: Any = trace.tb_frame.f_locals.get("node")
            if isinstance(node, torch.Node):
                source: Any = node.sourceRange()
                found = node.kind(), str(source).strip("\n")
            elif isinstance(node, torch.fx.Node) and found is None:
                target: Any = node.target
                name = str(target)
                if name.startswith("<"):
                    name = f"{target.__module__}.{target.__name__}"
                found = name, str(node.stack_trace or node.format_node() or "")
            trace = trace.tb_next
    return found


def _compare(
    program: ExportedProgram,
    module: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    rtol: float | None,
    atol: float | None,
) -> None:
    """Run both with the same inputs and random numbers, and compare what comes out."""
    results: list[list[Any]] = []
    for each in (module, program.module()):
        with torch.random.fork_rng(), torch.no_grad():
            torch.manual_seed(0)
            results.append(list(_leaves(each(*_copied(args), **_copied(kwargs)))))
    expected, actual = results
    try:
        torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol, equal_nan=True)
    except (AssertionError, TypeError) as error:
        raise ConversionError(
            f"to_export: the program computes something else than the module: {error}"
        ) from error


def _leaves(value: Any) -> Iterator[Any]:
    # A tuple may come back as a list, so only what is in it is compared.
    if isinstance(value, (list, tuple)):
        for each in value:
            yield from _leaves(each)
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            yield from _leaves(value[key])
    elif value is not None:
        yield value


def _copied(value: Any) -> Any:
    """Copy the tensors of inputs, which a module may write to."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return tuple(_copied(each) for each in value)
    if isinstance(value, list):
        return [_copied(each) for each in value]
    if isinstance(value, dict):
        return {key: _copied(each) for key, each in value.items()}
    return value
