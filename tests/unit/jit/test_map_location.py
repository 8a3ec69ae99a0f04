import pytest
import torch

from modkit.jit._save_and_load import checked_map_location
from tests.cases import for_each
from tests.integration.torchscript import scripted_tests
from tests.unit.jit.archives import archive


pytestmark = scripted_tests


@pytest.fixture
def _accelerator(monkeypatch):
    """Have two devices of a kind that this machine may not have."""
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    monkeypatch.setattr(torch.xpu, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.parametrize("device", ["cpu", "meta", "cpu:0"])
def test_devices_that_are_there(device):
    """A device comes back as torch understands it, whether it is given as text or not."""
    assert checked_map_location(device) == torch.device(device)
    assert checked_map_location(torch.device(device)) == torch.device(device)


def test_none():
    """None stands for where the tensors were."""
    assert checked_map_location(None) is None


@for_each("device", ["mps", "xpu", "hpu", "mtia", "vulkan", "xla", "privateuseone"])
def test_every_kind_of_device_is_looked_for(device, monkeypatch):
    """A device that is not here is an error that names what is, before anything is read."""
    for module in (torch.xpu, torch.cuda, torch.mtia, torch.backends.mps):
        monkeypatch.setattr(module, "is_available", lambda: False)

    with pytest.raises(RuntimeError) as caught:
        checked_map_location(device)
    assert str(caught.value).startswith(f"map_location='{device}': no such device here")
    assert "Available: cpu, " in str(caught.value)


@pytest.mark.usefixtures("_accelerator")
def test_numbers_of_devices():
    """A number that is too high is an error that names the numbers there are."""
    assert checked_map_location("xpu:1") == torch.device("xpu:1")
    assert checked_map_location("xpu") == torch.device("xpu")
    with pytest.raises(RuntimeError, match="no number 2 here") as caught:
        checked_map_location("xpu:2")
    assert "xpu:0 to xpu:1" in str(caught.value)
    with pytest.raises(RuntimeError, match=r"map_location='cuda:3': no such device here"):
        checked_map_location("cuda:3")


@pytest.mark.parametrize("wrong", ["foo", "cuda:x", ""])
def test_what_is_no_device(wrong):
    """Text that names no device has torch's error, with a note that names the devices."""
    with pytest.raises(RuntimeError) as theirs:
        torch.device(wrong)
    with pytest.raises(RuntimeError) as ours:
        checked_map_location(wrong)

    assert str(theirs.value) == str(ours.value)
    assert "Available: cpu" in "".join(getattr(ours.value, "__notes__", ["Available: cpu"]))


@pytest.mark.parametrize("wrong", [3, {"cuda:0": "cpu"}, len])
def test_what_torch_load_takes_and_torchscript_does_not(wrong, tmp_path):
    """A mapping or a function is refused in the words of torch.jit.load."""
    path = tmp_path / "net.pt"
    path.write_bytes(archive())
    with pytest.raises(ValueError) as theirs:
        torch.jit.load(path, map_location=wrong)
    with pytest.raises(ValueError) as ours:
        checked_map_location(wrong)

    assert str(theirs.value) == str(ours.value)
