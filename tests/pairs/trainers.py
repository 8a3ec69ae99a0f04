"""The rows of trainers: each step of the world is one of a real Trainer. Libraries are imported late."""

from __future__ import annotations

import contextlib
import logging
import queue
import sys
import threading
import warnings
from typing import TYPE_CHECKING, Any

import torch

from tests.pairs.features import Shown, ShowsModel, feature
from tests.pairs.worlds import DECAY, STEPS, Values, World, compare, values_of


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping


class OfTrainer(ShowsModel):
    """The view is a block of the callback."""

    def after(self, world: World, subject: Any) -> None:
        pass

    def rebind(self, subject: Any) -> None:
        subject.callback.ema.rebind()

    @contextlib.contextmanager
    def view(self, world: World, subject: Any) -> Iterator[Shown]:
        with subject.callback.evaluating():
            yield world.net

    def own(self, subject: Any) -> Mapping[str, torch.Tensor]:
        return dict(subject.callback.ema.named_averages())


class Fits:
    """A module of Lightning, which is fitted for one batch, again and again."""

    def __init__(self, world: World) -> None:
        from modkit.integrations.lightning import EMACallback

        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        self.module = lightning_module()(world.model, world.optimizer)
        self.callback = EMACallback(DECAY, **world.situation.options)
        self.path = world.folder / "run.ckpt"
        self.resumed: str | None = None
        self.trainer: Any = None

    def fit(self, step: Callable[[], None]) -> None:
        """Fit one epoch of one batch, more of a run that is resumed."""
        epochs = 2 if self.resumed else 1
        with self._trainer(epochs, step):
            self.trainer.fit(self.module, [0], ckpt_path=self.resumed)
        self.resumed = None

    def validate(self, world: World) -> Values:
        """Return the values that the model has while it is validated."""
        found: Values = {}
        with self._trainer(1, lambda: found.update(values_of(world.net))):
            self.trainer.validate(self.module, [0], verbose=False)
        return found

    @contextlib.contextmanager
    def _trainer(self, epochs: int, step: Callable[[], None]) -> Iterator[None]:
        from lightning.pytorch import Trainer

        options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        self.trainer = Trainer(
            max_epochs=epochs,
            accelerator="cpu",
            enable_model_summary=False,
            callbacks=[self.callback],
            **options,
        )
        self.module.step = step
        with warnings.catch_warnings():
            # Advice of Lightning.
            warnings.filterwarnings("ignore", "(?!EMA)")
            yield
        del self.module.step

    def state_dict(self) -> dict[str, str]:
        self.trainer.save_checkpoint(self.path)
        return {"path": str(self.path)}

    def load_state_dict(self, state: dict[str, str]) -> None:
        self.resumed = state["path"]

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "trainer": None}


def lightning_module() -> Any:
    """Return the class of modules that take one step of the world as a batch."""
    from lightning.pytorch import LightningModule

    class Module(LightningModule):
        def __init__(self, net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
            super().__init__()
            self.net, self.given = net, optimizer
            self.automatic_optimization = False

        def training_step(self, *_: object) -> None:
            self.step()

        validation_step = training_step

        def configure_optimizers(self) -> Any:
            return self.given

    # A pickle finds it here.
    Module.__qualname__ = "Module"
    return vars(sys.modules[__name__]).setdefault("Module", Module)


def __getattr__(name: str) -> Any:
    """Find the class when another process reads a pickle."""
    if name == "Module":
        return lightning_module()
    raise AttributeError(name)


@feature("Lightning's EMACallback", "model", "average", "block")
class Lightning(OfTrainer):
    libraries = ("lightning",)

    def begin(self, world: World) -> Any:
        subject = Fits(world)
        world.drive = subject.fit
        return subject

    def moved(self, world: World, subject: Any) -> None:
        world.drive = subject.fit

    def before(self, world: World, subject: Any) -> None:
        compare(subject.validate(world), self.expected(world), "validated")


class Trains:
    """A Trainer of transformers, in a thread that takes a step when the world does."""

    def __init__(self, world: World) -> None:
        import transformers

        from modkit.integrations.transformers import EMACallback

        steps: queue.Queue[Any] = queue.Queue()
        done: queue.Queue[Any] = queue.Queue()

        class Trainer(transformers.Trainer):
            def training_step(self, *_: object, **__: object) -> torch.Tensor:
                # Here, where this thread waits: another Trainer that is made resets what they share.
                done.put(None)
                step = steps.get()
                if step is None:
                    raise SystemExit
                step()
                return torch.zeros(())

            def get_train_dataloader(self) -> Any:
                return [{}]

        arguments = transformers.TrainingArguments(
            str(world.folder / "run"),
            max_steps=STEPS + 1,
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        )
        # The world takes its step, and this optimizer one that changes nothing.
        still = torch.optim.SGD(world.model.parameters(), lr=0.0)
        self.trainer = Trainer(world.model, arguments, optimizers=(still, None), train_dataset=[{}])
        self.callback = EMACallback(DECAY, **world.situation.options).attach(self.trainer)
        self.steps, self.done = steps, done
        self.thread = threading.Thread(target=self._train, daemon=True)

    def _train(self) -> None:
        error: BaseException | None = None
        try:
            self.trainer.train()
        except BaseException as raised:
            error = raised
        self.done.put(error)

    def drive(self, step: Callable[[], None]) -> None:
        """Let the Trainer take this step."""
        if not self.thread.ident:
            self.thread.start()
            self._wait()
        self.steps.put(step)
        self._wait()

    def _wait(self) -> None:
        """Wait until the Trainer asks for a step, or has ended."""
        error = self.done.get(timeout=60)
        for module in self.trainer.model.modules():
            # A mark of accelerate.
            vars(module).pop("_is_accelerate_prepared", None)
        if error is not None:
            raise error

    def end(self) -> None:
        """End the training, if it has not ended."""
        self.steps.put(None)
        self.thread.join()

    def state_dict(self) -> Any:
        return self.callback.ema.state_dict()

    def __deepcopy__(self, memo: Any) -> Any:
        """Return the averages: a Trainer is not copied."""
        return self.callback.ema


@feature("EMACallback of transformers", "model", "average", "block", "keeps its model")
class Transformers(OfTrainer):
    libraries = ("transformers", "accelerate")

    def begin(self, world: World) -> Any:
        subject = Trains(world)
        world.drive = subject.drive
        return subject

    def end(self, world: World, subject: Any) -> None:
        subject.end()
