"""Every writer of files in modkit behind one interface, for tests that save under faults.

``save(path, version)`` writes a file whose tensors all have the value ``version``; ``load(path)`` returns
the version of a complete file and raises for anything else.
"""

import contextlib
import importlib.util
import io
import logging
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

import modkit
from modkit import jit, nn
from modkit.averaging.posthoc import save_snapshot
from modkit.distributed import export_average


def tensors_in(content: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested containers."""
    if isinstance(content, Tensor):
        yield content
    elif isinstance(content, dict):
        for value in content.values():
            yield from tensors_in(value)
    elif isinstance(content, (list, tuple)):
        for value in content:
            yield from tensors_in(value)


class Vector(nn.Module):
    """A model with one vector."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(elements))

    def forward(self, x: Tensor) -> Tensor:
        """Multiply by the vector."""
        return x * self.w


class Writer:
    """One way to save a file.

    Args:
        elements: Number of elements of the saved vector.
    """

    name: ClassVar[str]
    file: ClassVar[str] = "last.pt"
    any_name: ClassVar[bool] = True  # False if the writer chooses the name of the file

    def __init__(self, elements: int) -> None:
        self.elements = elements

    def save(self, path: Path, version: int) -> None:
        """Save a version."""
        raise NotImplementedError

    def content(self, path: Path) -> Any:
        """Return the tensors in the file that have the version as their value."""
        return modkit.load_checkpoint(path)

    def load(self, path: Path) -> int:
        """Return the version in a complete file."""
        tensors = [tensor for tensor in tensors_in(self.content(path)) if tensor.numel() > 1]
        version = round(tensors[0][0].item())
        for tensor in tensors:
            assert tensor.shape == (self.elements,)
            torch.testing.assert_close(tensor, torch.full_like(tensor, version))
        return version


class Plain(Writer):
    """``modkit.save_checkpoint``."""

    name = "plain"

    def save(self, path: Path, version: int) -> None:
        modkit.save_checkpoint({"w": torch.full((self.elements,), float(version))}, path)


class Jit(Writer):
    """``modkit.jit.save``."""

    name = "jit"

    def __init__(self, elements: int) -> None:
        super().__init__(elements)
        warnings.filterwarnings("ignore", ".*TorchScript gets no new features")
        self.module = jit.script(Vector(elements))

    def save(self, path: Path, version: int) -> None:
        with torch.no_grad():
            self.module.w.fill_(version)
        jit.save(self.module, path)

    def content(self, path: Path) -> Any:
        return jit.load(path).w.detach()


class Snapshot(Writer):
    """Snapshots of ``PostHocEMA``."""

    name, any_name = "snapshot", False
    file = "ema-0000000001-0.05.pt"

    def save(self, path: Path, version: int) -> None:
        assert path.name == self.file
        averages = {"w": torch.full((self.elements,), float(version))}
        save_snapshot(path.parent, averages, step=1, sigma_rel=0.05)


class Export(Writer):
    """``export_average``."""

    name = "export_average"

    def __init__(self, elements: int) -> None:
        super().__init__(elements)
        self.ema = modkit.EMA(Vector(elements), 0.5)
        self.ema.update()

    def save(self, path: Path, version: int) -> None:
        for _, tensor in self.ema.named_averages():
            tensor.fill_(version)
        export_average(self.ema, path)


class SafetensorsExport(Export):
    """``export_average`` to a file of safetensors, which is written tensor by tensor."""

    name = "export_average-safetensors"
    file = "last.safetensors"

    def content(self, path: Path) -> Any:
        from safetensors.torch import load

        return load(path.read_bytes())  # the library opens no path that is not UTF-8


class Average(Writer):
    """``python -m modkit average``."""

    name = "average"

    def __init__(self, elements: int) -> None:
        super().__init__(elements)
        importlib.import_module("modkit.cli.average")
        self._folder = tempfile.TemporaryDirectory()
        self.inputs = [Path(self._folder.name, name) for name in ("0.pt", "1000.pt")]
        for path in self.inputs:
            torch.save({"w": torch.full((elements,), float(path.stem))}, path)
            path.chmod(0o644)
        self.inputs[0].parent.chmod(0o755)

    def save(self, path: Path, version: int) -> None:
        from modkit.cli._commands import commands

        # Of 0 and 1000, with these weights, the average is the version.
        options = ["--overwrite", "--weights", f"{1000 - version},{version}", "-o", str(path)]
        with contextlib.redirect_stdout(io.StringIO()):
            commands.main(["average", *map(str, self.inputs), *options], standalone_mode=False)


class Lightning(Writer):
    """A checkpoint of Lightning's Trainer with the callback of modkit."""

    name = "lightning"
    file = "last.ckpt"

    def __init__(self, elements: int) -> None:
        super().__init__(elements)
        for name in ("lightning.pytorch", "lightning.fabric"):
            logging.getLogger(name).setLevel(logging.ERROR)
        from tests.integration.lightning.runs import vector_trainer

        self.trainer, self.callback = vector_trainer(elements)

    def save(self, path: Path, version: int) -> None:
        with torch.no_grad():
            self.trainer.lightning_module.w.fill_(version)
        for _, tensor in self.callback.ema.named_averages():
            tensor.fill_(version)
        self.trainer.save_checkpoint(path)

    def content(self, path: Path) -> Any:
        found = self.trainer.strategy.checkpoint_io.load_checkpoint(path, weights_only=False)
        return found["state_dict"], found["callbacks"]


class Transformers(Writer):
    """The file ``ema.pt`` beside a checkpoint of the Trainer of transformers."""

    name, file, any_name = "transformers", "ema.pt", False

    def __init__(self, elements: int) -> None:
        super().__init__(elements)
        from tests.integration.transformers.trainers import vector_trainer

        self._folder = tempfile.TemporaryDirectory()
        self.trainer, self.callback = vector_trainer(Path(self._folder.name), elements)

    def save(self, path: Path, version: int) -> None:
        assert path.name == self.file
        with torch.no_grad():
            self.trainer.model.w.fill_(version)
        for _, tensor in self.callback.ema.named_averages():
            tensor.fill_(version)
        with self.callback._saving(path.parent, True):
            pass


def installed(name: str) -> bool:
    """Return True if a package is there."""
    return importlib.util.find_spec(name) is not None


OWN = [Plain, Jit, Snapshot, Export, SafetensorsExport, Average]
WRITERS = {writer.name: writer for writer in (*OWN, Lightning, Transformers)}
