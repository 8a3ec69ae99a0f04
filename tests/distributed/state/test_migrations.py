"""Migrating into a model that is sharded over the ranks."""

import pytest
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from modkit import migrations as mig
from modkit.errors import MigrationError
from tests.distributed.launcher import run
from tests.helpers import MODKIT, TORCH, seed_everything
from tests.unit.migrations.networks import (
    equal,
    joined,
    network,
    new_attention,
    old_attention,
    versions,
)


FULL = StateDictOptions(full_state_dict=True)


def sharded(impl):
    """Migrate a full state dict into a sharded model; return what each rank has seen."""
    seed_everything()
    old = network(impl.nn, old_attention(impl.nn)).state_dict()
    attention = new_attention(impl.nn)
    model = network(impl.nn, attention)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)

    new = mig.migrate(model, old)
    set_model_state_dict(model, new, options=FULL)
    full = get_model_state_dict(model, options=FULL)
    # The saved state has no versions: names decide that it is new, and its shards stay as they are.
    present = model.state_dict()
    again = mig.migrate(model, dict(present))
    back = mig.migrate(model, full, to={attention: 1})

    refused = ""
    shards = {name: value for name, value in model.state_dict().items() if "blocks" in name}
    try:
        mig.migrate(model, shards, to={attention: 1})
    except MigrationError as error:
        refused = str(error)
    return {
        "loaded": equal(full, joined(old)),
        "unchanged": list(again) == list(present)
        and all(again[name] is value for name, value in present.items()),
        "back": equal(back, old),
        "versions": versions(new)["blocks.0"],
        "refused": refused,
        "sharded": type(next(model.parameters())).__name__,
    }


@pytest.mark.distributed
@pytest.mark.parametrize("impl", [TORCH, MODKIT], ids=str)
def test_a_full_state_dict_migrates_into_a_sharded_model(impl, tmp_path):
    """On two ranks, a migrated full state dict loads, goes back, and shards are refused."""
    for found in run(2, sharded, impl, folder=tmp_path, limit=200.0):
        assert found["sharded"] == "DTensor"
        assert found["loaded"]
        assert found["unchanged"]
        assert found["back"]
        assert found["versions"] == 3
        assert "is a DTensor; migrate the full state dict" in found["refused"]
