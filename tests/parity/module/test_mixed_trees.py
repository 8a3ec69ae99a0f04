import torch

from tests.cases import for_each
from tests.helpers import TORCH, Implementation, same
from tests.models import child_leaf, leaf, tree
from tests.parity.module.contents import run


def mixed(impl: Implementation) -> torch.nn.Module:
    """Build a tree whose levels alternate between ``impl`` and plain torch modules."""
    root = tree(impl)
    root.layers = torch.nn.Sequential(
        torch.nn.Linear(3, 2), leaf(impl), torch.nn.BatchNorm1d(2), torch.nn.Dropout(0.5)
    )
    root.layers[1].inner = torch.nn.ModuleDict({"x": child_leaf(impl), "y": torch.nn.ReLU()})
    root.numbers = torch.nn.ParameterList([torch.nn.Parameter(torch.ones(1))])
    root.theirs = tree(TORCH)
    root.theirs.ours = tree(impl)
    return root


CALLS = (
    "list(m.named_parameters())",
    "list(m.named_buffers(remove_duplicate=False))",
    "[n for n, _ in m.named_modules()]",
    "[n for n, _ in m.named_modules(remove_duplicate=False)]",
    "[n for n, _ in m.named_children()]",
    "[type(each).__name__ for each in m.modules()]",
    "dict(m.state_dict())",
    "m.state_dict()._metadata",
    "repr(m)",
    "m.load_state_dict(m.state_dict())",
    "m.load_state_dict({'layers.1.inner.x.weight': ones(1)}, strict=False)",
    "m.load_state_dict({'layers.1.inner.x.weight': ones(2), 'theirs.gain': ones(2)})",
    "[p.dtype for p in m.double().parameters()]",
    "[b.dtype for b in m.half().buffers()]",
    "[each.training for each in m.eval().modules()]",
    "[p.requires_grad for p in m.requires_grad_(False).parameters()]",
    "[t.is_meta for t in m.to('meta').state_dict().values()]",
    "m.apply(lambda each: setattr(each, 'seen', True)).layers[1].inner.x.seen",
    "m.get_parameter('layers.1.inner.x.weight')",
    "m.get_buffer('theirs.ours.right.mean')",
    "m.get_submodule('theirs.ours.left.inner')._get_name()",
    "m.set_submodule('layers.0', Identity()) or repr(m.layers)",
    "m.share_memory().layers[0].weight.is_shared()",
    "sorted(dir(m.theirs.ours))[-20:]",
)


@for_each("call", CALLS)
def test_operations_on_a_mixed_tree(call):
    """Modules of both libraries in one tree behave as a tree of torch modules."""
    result = same(lambda impl: run(call, mixed(impl)))

    assert result[0] == ("raised" if "theirs.gain" in call else "returned")
