import pytest

from tests.distributed.launcher import run
from tests.distributed.migrations.sharded import sharded
from tests.helpers import MODKIT, TORCH


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
