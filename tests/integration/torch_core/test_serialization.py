from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cases import for_each
from tests.helpers import MODKIT, TORCH, Implementation, freeze
from tests.integration.networks import (
    NETWORKS,
    PICKLABLE,
    agree,
    make_batch,
    make_net,
)


both_ways = for_each(
    ("source", "target"),
    [(TORCH, MODKIT), (MODKIT, TORCH), (TORCH, TORCH), (MODKIT, MODKIT)],
    ids=str,
)
FORMATS = [
    {"save": {}, "load": {}},
    {"save": {}, "load": {"mmap": True}},
    {"save": {}, "load": {"map_location": "cpu"}},
    {"save": {"_use_new_zipfile_serialization": False}, "load": {}},
]


def trained_net(impl: Implementation, network: str) -> torch.nn.Module:
    """Build a network whose buffers differ from those of a fresh one."""
    net = make_net(impl.nn, network)
    net(make_batch(network))
    return net


@both_ways
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("form", FORMATS, ids=["zip", "mmap", "map_location", "legacy"])
def test_state_dict_file_loads_into_the_other(
    tmp_path: Path,
    network: str,
    form: dict[str, dict[str, Any]],
    source: Implementation,
    target: Implementation,
) -> None:
    """A saved state dict holds only tensors and loads strictly into the other library."""
    net = trained_net(source, network)
    torch.save(net.state_dict(), tmp_path / "net.pt", **form["save"])
    loaded = torch.load(tmp_path / "net.pt", weights_only=True, **form["load"])
    copy_of_net = make_net(target.nn, network)

    assert str(copy_of_net.load_state_dict(loaded)) == "<All keys matched successfully>"
    assert freeze(copy_of_net.state_dict()) == freeze(net.state_dict())
    assert freeze(copy_of_net.eval()(make_batch(network))) == freeze(
        net.eval()(make_batch(network))
    )


def test_whole_module_needs_no_private_classes(tmp_path: Path) -> None:
    """The classes to allow for a whole module are the same public ones as torch's."""

    def scenario(impl: Implementation) -> tuple[list[str], Any]:
        cls = PICKLABLE[impl.name]
        net = cls()
        torch.save(net, tmp_path / "net.pt")
        unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(tmp_path / "net.pt")
        allowed = [type(module) for module in net.modules()]
        with torch.serialization.safe_globals([*allowed, set]):
            loaded = torch.load(tmp_path / "net.pt", weights_only=True)
        names = sorted(name.rpartition(".")[2].replace(cls.__name__, "Net") for name in unsafe)
        return names, dict(loaded.state_dict())

    names, _ = agree(scenario)

    assert "BatchNorm1d" in names
