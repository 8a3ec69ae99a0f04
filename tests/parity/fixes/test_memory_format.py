import pytest
import torch

from tests.helpers import Implementation


def images_and_volumes(impl: Implementation) -> torch.nn.Module:
    """Build a network with parameters and buffers of 1, 4 and 5 dimensions."""
    module = impl.own.Sequential(impl.own.Conv2d(2, 2, 2), impl.own.Conv3d(2, 2, 2))
    module.register_buffer("image", torch.zeros(1, 2, 3, 4))
    module.register_buffer("volume", torch.zeros(1, 2, 3, 4, 5))
    return module


def formats(module: torch.nn.Module) -> dict[str, list[str]]:
    """Tell for each tensor the memory formats for images and volumes that it has."""
    found = {}
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        found[name] = []
        if tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
            found[name].append("channels_last")
        if tensor.dim() == 5 and tensor.is_contiguous(memory_format=torch.channels_last_3d):
            found[name].append("channels_last_3d")
    return found


@pytest.mark.parametrize(
    ("memory_format", "formatted"),
    [
        (torch.channels_last, {"0.weight": ["channels_last"], "image": ["channels_last"]}),
        (
            torch.channels_last_3d,
            {"1.weight": ["channels_last_3d"], "volume": ["channels_last_3d"]},
        ),
    ],
)
def test_a_format_is_for_its_number_of_dimensions(
    impl: Implementation, memory_format: torch.memory_format, formatted: dict[str, list[str]]
) -> None:
    """The format for images leaves volumes alone, and that for volumes leaves images alone."""
    module = images_and_volumes(impl)
    names = list(formats(module))
    result = module.to(memory_format=memory_format)

    assert result is module
    assert formats(module) == {name: formatted.get(name, []) for name in names}


def test_other_arguments_go_to_every_tensor(impl: Implementation) -> None:
    """The dtype that is given besides a memory format is for tensors of any dimensions."""
    module = images_and_volumes(impl).to(dtype=torch.float64, memory_format=torch.channels_last)

    assert {tensor.dtype for tensor in module.state_dict().values()} == {torch.float64}
    assert formats(module)["0.weight"] == ["channels_last"]
