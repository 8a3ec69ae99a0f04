"""Run a training script in this process, on torch or with its imports swapped, and record it.

python script_process.py OPTIONS.json

The script, and every module that it imports from its folder, is rewritten as ``modkit compat
--tests`` rewrites them. Nothing else of it changes. What is recorded does not depend on what the
script prints: the tensors that it calls ``backward()`` on, and every module and optimizer that is
alive at a step or at the end.
"""

import gc
import hashlib
import json
import os
import random
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

import modkit
from modkit.compat.swap import swap_source
from modkit.compat.swapped_imports import SwappedImports


# Modules and optimizers are looked for at the first steps, and at the end.
LOOKED_AT = (1, 2, 3)


def bits(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a tensor."""
    dense = tensor.detach().cpu()
    if dense.layout != torch.strided:
        dense = dense.to_dense()
    # Arrays lack some types of torch, such as bfloat16.
    return dense.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def digest(value: Any) -> str:
    """Return a digest of nested containers of tensors and of plain values."""
    found = hashlib.sha256()

    def add(item: Any) -> None:
        if isinstance(item, torch.Tensor):
            found.update(f"{item.dtype}{tuple(item.shape)}".encode())
            found.update(bits(item))
        elif isinstance(item, dict):
            for name, inner in item.items():
                found.update(repr(name).encode())
                add(inner)
        elif isinstance(item, (list, tuple)):
            found.update(str(len(item)).encode())
            for inner in item:
                add(inner)
        elif item is None or isinstance(item, (bool, int, float, str, bytes)):
            found.update(repr(item).encode())
        else:
            found.update(type(item).__qualname__.encode())

    add(value)
    return found.hexdigest()[:16]


class Recorder:
    """Records the losses, modules and optimizers of a script."""

    def __init__(self) -> None:
        self.losses: list[list[str]] = []
        self.steps = 0
        self._modules: dict[int, torch.nn.Module] = {}
        self._optimizers: dict[int, torch.optim.Optimizer] = {}
        self._averages: dict[int, modkit.EMA] = {}

    def install(self) -> None:
        """Record from now on."""
        run_backward = torch.autograd.backward

        def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
            losses = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
            self.losses.append([bits(loss).hex() for loss in losses])
            run_backward(tensors, *args, **kwargs)

        torch.autograd.backward = backward
        register_optimizer_step_post_hook(self._stepped)

    def _stepped(self, *_: Any) -> None:
        self.steps += 1
        if self.steps in LOOKED_AT:
            self._look()

    def _look(self) -> None:
        """Keep the modules without a parent, and the optimizers, that are alive."""
        gc.collect()
        objects = gc.get_objects()
        modules = [one for one in objects if is_a(one, torch.nn.Module)]
        children = {id(child) for module in modules for child in module._modules.values()}
        self._modules |= {id(one): one for one in modules if id(one) not in children}
        self._optimizers |= {id(one): one for one in objects if is_a(one, torch.optim.Optimizer)}
        self._averages |= {id(one): one for one in objects if is_a(one, modkit.EMA)}

    def result(self) -> dict[str, Any]:
        """Return what is compared, and how many of the modules are modkit's."""
        self._look()
        every = [module for root in self._modules.values() for module in root.modules()]
        return {
            "losses": self.losses,
            "steps": self.steps,
            "modules": digests(self._modules.values()),
            "optimizers": digests(self._optimizers.values()),
            "averages": digests(self._averages.values()),
            "random states": digest(
                [torch.get_rng_state(), list(np.random.get_state()), random.getstate()]
            ),
            "of modkit": sum(modkit.nn.Module in type(module).__mro__ for module in every),
        }


def is_a(item: object, kind: type) -> bool:
    """Return True for an instance; the class is not asked, because proxies answer for others."""
    return kind in getattr(type(item), "__mro__", ())


def digests(states: Any) -> list[str]:
    """Return class and digest of the state of each object, in an order that is the same each time."""
    return sorted(f"{type(one).__qualname__} {digest(one.state_dict())}" for one in states)


def run(options: dict[str, Any], report: Callable[[str], object]) -> None:
    """Run a script as ``python PATH ARGUMENTS`` does, with modkit in place of torch if swapped."""
    path = Path(options["script"])
    source = path.read_text(encoding="utf-8")
    if options["swap"]:
        SwappedImports(paths=[Path(options["tree"])], report=report).install()
        source = swap_source(source)
    main = types.ModuleType("__main__")
    main.__file__ = str(path)
    # Whatever the script pickles is looked up in this module.
    sys.modules["__main__"] = main
    sys.argv = [str(path), *options["arguments"]]
    sys.path[0] = str(path.parent)
    exec(compile(source, str(path), "exec"), main.__dict__)


def main() -> None:
    """Run the script of the options, and write the record."""
    options = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    tree, record = Path(options["tree"]), Path(options["record"])
    swapped: list[str] = []
    recorder = Recorder()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    recorder.install()
    try:
        run(options, swapped.append)
    except SystemExit as end:
        if end.code:
            raise
    files = [Path(sys.modules[name].__file__ or "") for name in swapped]
    result = {
        **recorder.result(),
        "swapped files": [str(file.relative_to(tree)) for file in files],
    }
    record.write_text(json.dumps(result), encoding="utf-8")
    sys.stdout.flush()
    # Loggers and workers of a script may wait for more at exit.
    os._exit(0)


if __name__ == "__main__":
    main()
