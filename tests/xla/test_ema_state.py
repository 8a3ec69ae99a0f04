from pathlib import Path
from typing import Any

import pytest
import torch

import modkit
from tests.xla.recipes import network, on_host, train
from tests.xla.test_ema_updates import PRECISIONS, SCHEDULES


pytestmark = pytest.mark.xla


def resumed(
    place: Any, tmp_path: Path, other: Any, options: dict[str, Any], dtype: torch.dtype
) -> tuple[Any, Any]:
    """Return averages and weights of a run without a break, and of one resumed from a file."""
    net = network(place, dtype)
    ema = modkit.EMA(net, **options)
    train(net, ema.update, 0, 4)
    path = tmp_path / "state.pt"
    modkit.save_checkpoint({"ema": ema.state_dict(), "model": net.state_dict()}, path)
    train(net, ema.update, 4, 8)

    second = network(other, dtype)
    second_ema = modkit.EMA(second, **options)
    state = modkit.load_checkpoint(path)
    modkit.load_state_dict(second, state["model"])
    second_ema.load_state_dict(state["ema"])
    train(second, second_ema.update, 4, 8)
    runs = (net, ema), (second, second_ema)
    return tuple(on_host([dict(e.named_averages()), n.state_dict()]) for n, e in runs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        *({"precision": precision, "decay": 0.9} for precision in PRECISIONS),
        *({"schedule": schedule} for schedule in SCHEDULES.values()),
    ],
    ids=str,
)
def test_resume_is_bitwise_identical(
    options: dict[str, Any], dtype: torch.dtype, tmp_path: Path, device: torch.device
) -> None:
    """A run that is saved, loaded and continued on the device gives the bits of one without a break."""
    expected, found = resumed(device, tmp_path, device, options, dtype)

    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("places", [("cpu", "xla"), ("xla", "cpu")], ids="-".join)
def test_resume_on_the_other_device(
    places: tuple[str, str], tmp_path: Path, device: torch.device
) -> None:
    """A state of the CPU continues on XLA, and the other way round."""
    first, second = (device if place == "xla" else "cpu" for place in places)
    options = {"decay": 0.9, "precision": "fp64"}
    expected, found = resumed(first, tmp_path, second, options, torch.float32)

    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("map_location", [None, "cpu"])
def test_files(map_location: str | None, tmp_path: Path, device: torch.device) -> None:
    """A file of tensors of the device is that of torch: read to the device, or to the CPU."""
    state = network(device).state_dict()
    modkit.save_checkpoint({"net": state}, tmp_path / "ours.pt")
    torch.save({"net": state}, tmp_path / "theirs.pt")
    found = modkit.load_checkpoint(tmp_path / "ours.pt", map_location=map_location)["net"]
    expected = torch.load(tmp_path / "theirs.pt", map_location=map_location)["net"]

    assert {one.device for one in found.values()} == {one.device for one in expected.values()}
    torch.testing.assert_close(on_host(found), on_host(expected), rtol=0, atol=0)


def test_reading_a_file_to_the_device_is_refused_by_torch(
    tmp_path: Path, device: torch.device
) -> None:
    """torch_xla registers no place for storages, so modkit raises the error of torch."""
    modkit.save_checkpoint({"net": network("cpu").state_dict()}, tmp_path / "cpu.pt")
    for load in (torch.load, modkit.load_checkpoint):
        with pytest.raises(RuntimeError, match="don't know how to restore data location") as caught:
            load(tmp_path / "cpu.pt", map_location=device)
        assert type(caught.value) is RuntimeError
