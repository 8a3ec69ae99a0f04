import importlib.util
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from modkit.files.atomic_write import atomic_write
from tests.integration.lightning import runs
from tests.integration.lightning.runs import QUIET


pytestmark = QUIET


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory):
    """Return the numbers at the end of a run, and a checkpoint from its middle."""
    folder = tmp_path_factory.mktemp("run")
    net, ema, _ = runs.fit(folder, runs.Saver(folder))
    return runs.numbers_of(net, ema), (folder / "mid-epoch.ckpt").read_bytes()


def resumed(path: Path):
    """Go on from a checkpoint; return the numbers at the end."""
    net, ema, _ = runs.fit(path.parent, resume=path)
    return runs.numbers_of(net, ema)


def flip(content: bytes) -> bytes:
    """Change one bit of a training weight."""
    checkpoint = torch.load(io.BytesIO(content), weights_only=False)
    raw = checkpoint["callbacks"]["EMACallback"]["raw"]["net.0.weight"]
    place = content.index(raw.numpy().tobytes())
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


DAMAGES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "half": (lambda content: content[: len(content) // 2], "the end of a zip file is missing"),
    "empty": (lambda content: b"", "the end of a zip file is missing"),
    "flip": (flip, "checksum"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_corrupt_checkpoint(tmp_path: Path, saved, damage: str) -> None:
    """The error names the file and says what can be done."""
    change, text = DAMAGES[damage]
    path = tmp_path / "last.ckpt"
    path.write_bytes(change(saved[1]))

    with pytest.raises(ValueError, match=rf"last\.ckpt is corrupt: .*{text}"):
        resumed(path)


def csv_logger(folder: Path) -> Any:
    """Return a logger whose next run gets ``lightning_logs/version_1``."""
    return runs.pl.loggers.CSVLogger(folder)


def tensorboard_logger(folder: Path) -> Any:
    """Return Lightning's default logger where TensorBoard is installed."""
    if not any(map(importlib.util.find_spec, ("tensorboard", "tensorboardX"))):
        pytest.skip("needs tensorboard or tensorboardX")
    return runs.pl.loggers.TensorBoardLogger(folder)


def named_logger(folder: Path) -> Any:
    """Return a logger with a version of the user's, and no folder for its name."""
    return runs.pl.loggers.CSVLogger(folder / "lightning_logs", name="", version="version_1")


def leave(folder: Path) -> Path:
    """Leave in a folder what a process leaves that is killed while it saves."""
    stale = folder / ".modkit-stale.tmp"
    stale.mkdir(parents=True)
    (stale / "step=3.ckpt").touch()
    return stale


@pytest.mark.parametrize("logger", [csv_logger, tensorboard_logger, named_logger])
def test_leftovers_of_a_killed_run(tmp_path: Path, logger: Callable[[Path], Any]) -> None:
    """The next run, to which the logger gives another folder, removes them; a save in progress stays."""
    folder = tmp_path / "lightning_logs" / "version_0" / "checkpoints"
    folder.mkdir(parents=True)
    elsewhere = leave(tmp_path / "mine" / "version_0" / "checkpoints")
    with atomic_write(folder / "living.ckpt") as unfinished:
        # This save would have removed it.
        stale = leave(folder)
        saving = runs.pl.callbacks.ModelCheckpoint()
        runs.fit(tmp_path, saving, logger=logger(tmp_path), max_epochs=1)
        assert not stale.exists()
        assert unfinished.parent.exists()
        unfinished.write_bytes(b"whole")

    saved_in = Path(saving.best_model_path).parent
    assert saved_in == tmp_path / "lightning_logs" / "version_1" / "checkpoints"
    assert [path.name for path in folder.iterdir()] == ["living.ckpt"]
    assert elsewhere.exists(), "not a folder of the logger"
