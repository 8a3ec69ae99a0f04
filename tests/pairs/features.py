"""The rows: small recipes, each of which does one job in the world that a situation has prepared."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed import checkpoint

import modkit
from modkit import distributed, jit, migrations
from modkit.compat import model as compat_model
from modkit.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from tests.pairs.worlds import DECAY, ON_TORCH, STEPS, Values, World, averaged, plain, reference
from tests.unit.cli.command_line import invoke


if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

Shown = Any  # a model with the values in it, or the values by name


class Feature:
    """A row: what happens before, during and after the training, and what must then be seen.

    Attributes:
        traits: What situations may ask for; they name one or more in `Situation.needs`.
        libraries: Packages without which the row is not run.
        nests: Whether the view may be opened while it is open.
    """

    name: ClassVar[str]
    traits: ClassVar[frozenset[str]] = frozenset()
    libraries: ClassVar[tuple[str, ...]] = ()
    nests: ClassVar[bool] = True

    def begin(self, world: World) -> Any:
        """Return the object that does the job."""

    def after(self, world: World, subject: Any) -> None:
        """Do what the feature does after a step."""

    def moved(self, world: World, subject: Any) -> None:
        """Meet a new model or optimizer in the middle of the training."""

    def before(self, world: World, subject: Any) -> None:
        """Get ready for the view, which may be open several times at once."""

    @contextlib.contextmanager
    def view(self, world: World, subject: Any) -> Iterator[Shown]:
        """Show a model, or values by name, that must be what `expected` returns."""
        raise NotImplementedError

    def expected(self, world: World) -> Values:
        """Return the values that the view must show."""
        return world.situation.current(world)

    def rebind(self, subject: Any) -> None:
        """Accept that names of the model have changed."""

    def own(self, subject: Any) -> Mapping[str, torch.Tensor]:
        """Return the tensors that the object holds by itself."""
        return {}

    def end(self, world: World, subject: Any) -> None:
        """Take the feature off."""


def _only(values: Values, names: set[str]) -> Values:
    return {name: each for name, each in values.items() if name in names}


FEATURES: dict[str, Feature] = {}


def feature(name: str, *traits: str) -> Any:
    """Enter a class into the table."""

    def enter(cls: type[Feature]) -> type[Feature]:
        cls.name, cls.traits = name, frozenset(traits)
        FEATURES[name] = cls()
        return cls

    return enter


# Averages of `EMA`.


@feature("update", "average")
class Update(Feature):
    def begin(self, world: World) -> Any:
        return modkit.EMA(world.model, DECAY, **world.situation.options)

    def after(self, world: World, subject: Any) -> None:
        subject.update()

    def rebind(self, subject: Any) -> None:
        subject.rebind()

    @contextlib.contextmanager
    def view(self, world: World, subject: Any) -> Iterator[Shown]:
        yield dict(subject.named_averages())

    def expected(self, world: World) -> Values:
        return _only(averaged(world.situation), world.situation.names(world))

    def own(self, subject: Any) -> Mapping[str, torch.Tensor]:
        return dict(subject.named_averages())


@feature("attach", "average")
class Attach(Update):
    def begin(self, world: World) -> Any:
        return super().begin(world).attach(world.optimizer)

    def after(self, world: World, subject: Any) -> None:
        pass

    def moved(self, world: World, subject: Any) -> None:
        subject.attach(world.optimizer)

    def end(self, world: World, subject: Any) -> None:
        subject.detach()


class ShowsModel(Update):
    """The view shows a model, with all of its tensors."""

    def expected(self, world: World) -> Values:
        return averaged(world.situation)


@feature("applied", "model", "average", "block")
class Applied(ShowsModel):
    @contextlib.contextmanager
    def view(self, world: World, subject: Any) -> Iterator[Shown]:
        with subject.applied():
            yield world.net


@feature("store, copy_to, restore", "model", "average", "block")
class Store(ShowsModel):
    nests = False

    @contextlib.contextmanager
    def view(self, world: World, subject: Any) -> Iterator[Shown]:
        subject.store()
        subject.copy_to()
        try:
            yield world.net
        finally:
            subject.restore()


@feature("averaged_model", "model", "average")
class Averaged(ShowsModel):
    @contextlib.contextmanager
    def view(self, world: World, subject: Any) -> Iterator[Shown]:
        yield world.situation.unwrapped(subject.averaged_model())


@feature("module", "model", "average")
class OneModule(ShowsModel):
    @contextlib.contextmanager
    def view(self, world: World, subject: Any) -> Iterator[Shown]:
        yield world.situation.unwrapped(subject.module)


@feature("update_bn", "model", "average", "block")
class UpdateBn(Applied):
    def before(self, world: World, subject: Any) -> None:
        subject.update_bn([world.situation.batch(number) for number in (100, 101)])

    def expected(self, world: World) -> Values:
        """Return the averages, with the statistics that torch's own function computes with them."""
        values = super().expected(world)
        model = world.situation.holding(world, values)
        torch.optim.swa_utils.update_bn(
            [world.situation.batch(number) for number in (100, 101)], model
        )
        statistics = {name: each.double() for name, each in model.named_buffers()}
        return {
            **values,
            **{n: s for n, s in statistics.items() if ".running_" in f".{n}"},
            **{n: s.long() for n, s in statistics.items() if "num_batches" in n},
        }


@feature("export_average", "average", "writes", "ranks together")
class Export(Update):
    @contextlib.contextmanager
    def view(self, world: World, subject: Any) -> Iterator[Shown]:
        path = world.shared / "average.pt"
        distributed.export_average(subject, path)
        found = torch.load(path, weights_only=True)
        yield _only(found, {*self.expected(world)})

    def expected(self, world: World) -> Values:
        return _only(averaged(world.situation), world.situation.saved(world))


@feature("state of EMA", "average", "writes", "state")
class State(Update):
    @contextlib.contextmanager
    def view(self, world: World, subject: Any) -> Iterator[Shown]:
        path = world.folder / "ema.pt"
        state = world.situation.passed(world, subject.state_dict())
        modkit.save_checkpoint({"ema": state}, path)
        other = modkit.EMA(world.fresh(), DECAY, **world.situation.options)
        other.load_state_dict(modkit.load_checkpoint(path)["ema"])
        assert (other.step, other.n_averaged) == (subject.step, subject.n_averaged)
        yield dict(other.named_averages())


@feature("load_averages", "average", "writes", "ranks together")
class LoadAverages(State):
    """A distributed checkpoint, which all ranks write."""

    @contextlib.contextmanager
    def view(self, world: World, subject: Any) -> Iterator[Shown]:
        folder = world.shared / "averages"
        other = modkit.EMA(world.fresh(), DECAY, **world.situation.options)
        with warnings.catch_warnings():
            # Of one rank, and of an earlier run.
            warnings.filterwarnings("ignore", ".*assuming the intent|.*Detected an existing")
            checkpoint.save({"ema": subject}, checkpoint_id=folder)
        distributed.load_averages(other, folder)
        assert (other.step, other.n_averaged) == (subject.step, subject.n_averaged)
        yield dict(other.named_averages())


@feature("PostHocEMA", "model", "average", "writes")
class PostHoc(Feature):
    width = 0.1

    def begin(self, world: World) -> Any:
        # The width that is shown is the first average, which `applied()` swaps in.
        widths = (self.width, 0.05)
        options = {"snapshot_every": 2, **world.situation.options}
        return modkit.PostHocEMA(world.model, world.folder / "snapshots", widths, **options)

    def after(self, world: World, subject: Any) -> None:
        subject.update()

    @contextlib.contextmanager
    def view(self, world: World, subject: Any) -> Iterator[Shown]:
        # The width is one of the two that are tracked, so nothing is fitted.
        model = world.fresh()
        subject.reconstruct(self.width).copy_to(model, strict=not world.situation.options)
        yield model

    def expected(self, world: World) -> Values:
        low, high = 0.0, 1e4
        for _ in range(200):
            gamma = (low + high) / 2
            relative = ((gamma + 1) / ((gamma + 2) ** 2 * (gamma + 3))) ** 0.5
            low, high = (gamma, high) if relative > self.width else (low, gamma)
        return averaged(world.situation, gamma=gamma)


# Callbacks.


@feature("evaluating", "model", "average", "block")
class Evaluating(ShowsModel):
    def begin(self, world: World) -> Any:
        return modkit.EMACallback(world.model, world.optimizer, DECAY, **world.situation.options)

    def after(self, world: World, subject: Any) -> None:
        pass

    def moved(self, world: World, subject: Any) -> None:
        subject.ema.attach(world.optimizer)

    def rebind(self, subject: Any) -> None:
        subject.ema.rebind()

    @contextlib.contextmanager
    def view(self, world: World, subject: Any) -> Iterator[Shown]:
        with subject.evaluating() as model:
            assert not model.training
            yield world.net

    def own(self, subject: Any) -> Mapping[str, torch.Tensor]:
        return dict(subject.ema.named_averages())

    def end(self, world: World, subject: Any) -> None:
        subject.ema.detach()


@feature("evaluating by hooks", "model", "average", "block")
class Hooks(Evaluating):
    nests = False

    @contextlib.contextmanager
    def view(self, world: World, subject: Any) -> Iterator[Shown]:
        subject.on_validation_start()
        try:
            yield world.net
        except BaseException:
            subject.on_exception()
            raise
        subject.on_validation_end()


@feature("state of EMACallback", "model", "average", "state")
class CallbackState(Evaluating):
    @contextlib.contextmanager
    def view(self, world: World, subject: Any) -> Iterator[Shown]:
        model = world.fresh()
        other = modkit.EMACallback(
            model, torch.optim.SGD(model.parameters(), lr=0.1), DECAY, **world.situation.options
        )
        other.load_state_dict(world.situation.passed(world, subject.state_dict()))
        with other.evaluating() as shown:
            yield shown


@feature("AveragedModel", "model", "average")
class SwaModel(Feature):
    def begin(self, world: World) -> Any:
        return AveragedModel(
            world.model, multi_avg_fn=get_ema_multi_avg_fn(DECAY), **world.situation.options
        )

    def after(self, world: World, subject: Any) -> None:
        subject.update_parameters(world.model)

    @contextlib.contextmanager
    def view(self, world: World, subject: Any) -> Iterator[Shown]:
        assert int(subject.n_averaged) == world.step
        yield world.situation.unwrapped(subject.module)

    def expected(self, world: World) -> Values:
        """Return the averages; what did not train when the object was made is copied."""
        late = tuple(world.situation.late)
        current = world.situation.current(world)
        copied = {name: each for name, each in current.items() if late and name.startswith(late)}
        return averaged(world.situation) | copied

    def own(self, subject: Any) -> Mapping[str, torch.Tensor]:
        return dict(subject.state_dict())


@feature("state of AveragedModel", "model", "average", "state")
class SwaState(SwaModel):
    @contextlib.contextmanager
    def view(self, world: World, subject: Any) -> Iterator[Shown]:
        other = AveragedModel(
            world.fresh(), multi_avg_fn=get_ema_multi_avg_fn(DECAY), **world.situation.options
        )
        other.load_state_dict(world.situation.passed(world, subject.state_dict()))
        assert int(other.n_averaged) == world.step
        yield world.situation.unwrapped(other.module)


# Loading, files and commands: they show the weights of the training.


class Loading(Feature):
    """Load the state of the training into a second model."""

    @contextlib.contextmanager
    def view(self, world: World, subject: Any) -> Iterator[Shown]:
        model = world.fresh(saved=True)
        state = world.situation.passed(world, world.situation.state(world))
        self.load(model, state, world.situation)
        # A state of packed weights is made for the caller: both live while they are compared.
        states = [model.state_dict(), world.net.state_dict()]
        places, own = (
            {each.data_ptr() for each in state.values() if torch.is_tensor(each)}
            for state in states
        )
        assert not (places & own) - {0}, "the loaded model shares memory"
        yield model

    def load(self, model: Any, state: Any, situation: Any) -> None:
        raise NotImplementedError


@feature("load_state_dict of Module", "model", "loads")
class LoadStateDict(Loading):
    def load(self, model: Any, state: Any, situation: Any) -> None:
        result = model.load_state_dict(state)
        assert not result.missing_keys
        assert not result.unexpected_keys


@feature("modkit.load_state_dict", "model", "loads")
class LoadFunction(Loading):
    def load(self, model: Any, state: Any, situation: Any) -> None:
        result = modkit.load_state_dict(model, state)
        assert not result.missing_keys
        assert not result.unexpected_keys


@feature("load_matching", "model", "loads")
class LoadMatching(Loading):
    def load(self, model: Any, state: Any, situation: Any) -> None:
        old = _renamed(state, lambda name: f"trunk.{name}".replace("norm.", "bn."))
        strip = ["trunk.", *filter(None, [situation.prefix])]
        # A stage of a pipeline may be without it.
        rename = {"bn": "norm"} if "norm" in dict(model.named_children()) else {}
        matched = modkit.load_matching(model, old, strip=strip, rename=rename)
        assert (matched.skipped, matched.missing) == ({}, [])
        members = {
            *dict(model.named_parameters(remove_duplicate=False)),
            *dict(model.named_buffers()),
        }
        assert members & model.state_dict().keys() <= {*matched.loaded}


def _renamed(state: Any, rename: Any) -> Any:
    """Return a state dict with other names, and the versions of modules under them."""
    result = type(state)((rename(name), state[name]) for name in state)
    if hasattr(state, "_metadata"):
        result._metadata = {rename(f"{path}.")[:-1]: each for path, each in state._metadata.items()}
    return result


def _before_migration(state: Any, situation: Any) -> Any:
    """Return the state of a `Holder` of version 1, in the wrapper of the situation."""
    start = situation.prefix
    old = _renamed(state, lambda name: f"{start}model.{name.removeprefix(start)}")
    if hasattr(old, "_metadata"):
        old._metadata[start[:-1]] = {"version": 1}
    return old


@migrations.declare({2: [migrations.rename("model.**", "net.**")]})
class Holder(modkit.nn.Module):
    """A container whose child had another name in version 1."""

    def __init__(self, net: torch.nn.Module) -> None:
        super().__init__()
        self.net = net


@feature("migrations", "model", "loads")
class Migrations(Loading):
    def load(self, model: Any, state: Any, situation: Any) -> None:
        Holder(model).load_state_dict(_before_migration(state, situation))


class Reading(Feature):
    """Read a file that the situation has written."""

    @contextlib.contextmanager
    def view(self, world: World, subject: Any) -> Iterator[Shown]:
        path = world.situation.write(world, world.folder / "last.pt")
        before = _content(path)
        found = self.read(world, path)
        assert _content(path) == before, "the file has changed"
        yield _only(found, {name for name in found if not re.search(PACKED, name)})

    def read(self, world: World, path: Path) -> dict[str, Any]:
        raise NotImplementedError

    def expected(self, world: World) -> Values:
        values = _only(super().expected(world), world.situation.saved(world))
        return {world.situation.prefix + name: each for name, each in values.items()}


def _with_tied(found: Values, expected: Values) -> Values:
    """Add the names of tied tensors: safetensors holds each tensor under one of its names."""
    others = {name: each for name, each in expected.items() if name not in found}
    assert all(any(torch.equal(one, each) for each in found.values()) for one in others.values())
    return {**found, **others}


# Entries of quantized layers besides their parameters and buffers.
PACKED = r"^body\.(scale|zero_point|_packed_params)"


def _largest(world: World) -> str:
    parameters = dict(world.net.named_parameters())
    return max(parameters, key=lambda name: parameters[name].numel())


def _content(path: Path) -> dict[str, bytes]:
    return {each.name: each.read_bytes() for each in [path, *path.rglob("*")] if each.is_file()}


def command(*arguments: object) -> str:
    """Run a command line, which must succeed; return what it printed."""
    result = invoke(*arguments)
    if result.exit_code:
        raise ValueError(result.output)
    return result.stdout


@feature("save_checkpoint, load_checkpoint", "writes", "saves")
class Checkpoint(Reading):
    @contextlib.contextmanager
    def view(self, world: World, subject: Any) -> Iterator[Shown]:
        path = world.folder / "checkpoint.pt"
        modkit.save_checkpoint({"model": world.situation.state(world), "step": 3}, path)
        found = modkit.load_checkpoint(path)
        assert found["step"] == torch.load(path, weights_only=True)["step"] == 3
        yield _only(found["model"], {*self.expected(world)})


@feature("load_checkpoint", "reads", "all of the file")
class LoadCheckpoint(Reading):
    def read(self, world: World, path: Path) -> dict[str, Any]:
        return dict(modkit.load_checkpoint(path)["model"])


@feature("inspect", "reads")
class Inspect(Reading):
    def read(self, world: World, path: Path) -> dict[str, Any]:
        command("inspect", path)
        found = modkit.files.inspect(path)
        shapes = {each.name: each.shape for each in found.tensors}
        for name, value in self.expected(world).items():
            # A shard.
            if "rebuild" in str(found.entries.get(f"model.{name}")):
                shapes[f"model.{name}"] = value.shape
        return {
            name.removeprefix("model."): torch.empty(shape, device="meta")
            for name, shape in shapes.items()
        }


@feature("verify", "reads")
class Verify(Reading):
    """An intact file passes; one with a flipped bit in a tensor does not."""

    def read(self, world: World, path: Path) -> dict[str, Any]:
        modkit.files.verify(path)
        command("verify", path)
        if world.situation.has_checksums:
            member = max(each for each in [path, *path.rglob("*")] if each.is_file())
            content = bytearray(path.read_bytes() if path.is_file() else member.read_bytes())
            weight = world.net.get_parameter(_largest(world))
            own = plain(weight.to_local() if hasattr(weight, "to_local") else weight)
            bits = own.contiguous().view(torch.uint8).numpy().tobytes()
            content[content.index(bits)] ^= 1
            flipped = path.with_name("flipped")
            flipped.write_bytes(content)
            with pytest.raises(modkit.errors.FileError, match="does not match its checksum"):
                modkit.files.verify(flipped)
        return self.expected(world)


@feature("convert", "reads", "writes")
class Convert(Reading):
    def read(self, world: World, path: Path) -> dict[str, Any]:
        target = path.with_suffix(".safetensors")
        command("convert", path, "-o", target, "--key", "model", "--overwrite")
        return _with_tied(load_file(target), self.expected(world))


@feature("diff", "reads")
class Diff(Reading):
    """A file has no difference to its copy, and the value that was changed is named."""

    def read(self, world: World, path: Path) -> dict[str, Any]:
        values = {"model": {name: each.clone() for name, each in self.expected(world).items()}}
        torch.save(values, path.with_name("same.pt"))
        options = ("--values", "--key", "model", "--json")
        same = json.loads(command("diff", path, path.with_name("same.pt"), *options))
        values["model"][world.situation.prefix + _largest(world)] += 1
        torch.save(values, path.with_name("other.pt"))
        result = invoke("diff", path, path.with_name("other.pt"), *options)
        assert result.exit_code == 1
        assert _largest(world) in json.dumps(json.loads(result.stdout)["values"])
        assert same["equal"], same
        return self.expected(world)


@feature("average_checkpoints", "average", "reads")
class Soup(Reading):
    """The plain mean of the files of all steps."""

    def begin(self, world: World) -> Any:
        return []

    def after(self, world: World, subject: Any) -> None:
        subject.append(world.situation.write(world, world.folder / f"{world.step}.pt"))

    @contextlib.contextmanager
    def view(self, world: World, subject: Any) -> Iterator[Shown]:
        found = self.mean(subject[:STEPS], world.folder / "mean.pt")
        yield _only(found, {name for name in found if not re.search(PACKED, name)})

    def mean(self, paths: list[Path], target: Path) -> dict[str, Any]:
        return modkit.average_checkpoints(paths, key="model")

    def expected(self, world: World) -> Values:
        names = world.situation.saved(world)
        history = [_only(each, names) for each in reference(world.situation)[:STEPS]]
        return {
            world.situation.prefix + name: torch.stack(
                [each[name].double() for each in history]
            ).mean(0)
            if last.is_floating_point()
            else last
            for name, last in history[-1].items()
        }


@feature("modkit average", "average", "reads", "writes")
class SoupCommand(Soup):
    def mean(self, paths: list[Path], target: Path) -> dict[str, Any]:
        command("average", *paths, "-o", target, "--key", "model", "--overwrite")
        return torch.load(target, weights_only=True)


@feature("modkit migrate", "reads", "writes")
class MigrateFile(Reading):
    def read(self, world: World, path: Path) -> dict[str, Any]:
        old = _before_migration(world.situation.state(world), world.situation)
        path = world.situation.write(world, path.with_name("old.pt"), {"model": old})
        target = path.with_name("new.safetensors")
        model = Holder(world.fresh(saved=True))
        migrations.migrate_file(model, path, target, key="model")
        found = {name.removeprefix("net."): each for name, each in load_file(target).items()}
        prefix = world.situation.prefix
        found = {prefix + name: each for name, each in found.items()}
        return _with_tied(found, self.expected(world))


# Models that are called.


@feature("fast_inference", "model", "block")
class Fast(Feature):
    @contextlib.contextmanager
    def view(self, world: World, subject: Any) -> Iterator[Shown]:
        with modkit.fast_inference(world.net):
            yield world.net


@feature("jit", "model", "writes")
class Jit(Feature):
    @contextlib.contextmanager
    def view(self, world: World, subject: Any) -> Iterator[Shown]:
        path = world.folder / "traced.pt"
        modes = world.net.training
        traced = jit.trace(world.net.eval(), (world.situation.batch(-1),))
        world.net.train(modes)
        jit.save(traced, path)
        yield jit.load(path)


@feature("compat")
class Compat(Feature):
    """Compare models on torch and on modkit in one process, as `modkit compat` does in two."""

    @contextlib.contextmanager
    def view(self, world: World, subject: Any) -> Iterator[Shown]:
        name = world.situation.name
        inputs = ((world.situation.batch(-1),), {})
        on_modkit = self._outcomes(world.situation, inputs)
        home = [f"tests.pairs.{name}" for name in ("worlds", "situations")]
        with mock.patch.dict(os.environ, {ON_TORCH: "1"}), mock.patch.dict(sys.modules):
            # Pickles find the classes under the same names.
            for each in home:
                del sys.modules[each]
            twins = importlib.import_module(home[1]).SITUATIONS
            on_torch = self._outcomes(twins[name], inputs)
        assert on_modkit == on_torch
        assert on_torch["output, gradients and buffers in training mode"][0] == "returns", on_torch
        yield self.expected(world)

    def _outcomes(self, situation: Any, inputs: Any) -> dict[str, Any]:
        torch.manual_seed(0)
        checks = compat_model.checks(situation.build(), inputs)
        return {name: compat_model._checked(check) for name, check in checks.items()}
