import copy
import io
import pickle

import torch

from tests.cases import for_each
from tests.helpers import Implementation, freeze
from tests.parity.module.picklable import NETS


def net(impl: Implementation, depth: int = 1) -> torch.nn.Module:
    """Build the net that can be pickled."""
    return NETS[impl.name](depth)


def saved_and_loaded(module: torch.nn.Module) -> torch.nn.Module:
    """Send a module through ``torch.save``."""
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "torch.save": saved_and_loaded,
    **{
        f"pickle {protocol}": lambda m, protocol=protocol: pickle.loads(
            pickle.dumps(m, protocol=protocol)
        )
        for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1)
    },
}


@for_each("way", COPIES)
def test_a_copy_is_complete(impl: Implementation, way: str) -> None:
    """A copy has all members, modes and plain values, ties and sharing included."""
    module = net(impl, 2)
    module.child.eval()
    copied = COPIES[way](module)

    assert type(copied) is type(module)
    assert list(vars(copied)) == list(vars(module))
    assert freeze(copied) == freeze(module)
    assert copied.tied is copied.weight
    assert copied.again is copied.child
    assert [m.training for m in copied.modules()] == [m.training for m in module.modules()]
    assert copied.config == {"width": 2, "names": ["a"]}
    assert copied._non_persistent_buffers_set == {"loose"}
    assert [type(v) for v in vars(copied).values()] == [type(v) for v in vars(module).values()]
