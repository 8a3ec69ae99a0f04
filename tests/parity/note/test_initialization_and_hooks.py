import pytest
import torch

from tests.helpers import MODKIT, Implementation, same


@pytest.mark.parametrize("device", ["cpu", "meta", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_initializing_directly_on_a_device(impl: Implementation, device: str) -> None:
    """`device=` puts all parameters of a layer there at once."""
    m = impl.own.Linear(5, 3, device=device)

    assert {p.device.type for p in m.parameters()} == {device}


def test_initializing_with_half_precision(impl: Implementation) -> None:
    """`dtype=` makes all parameters of a layer with that type."""
    m = impl.own.Linear(5, 3, dtype=torch.half)

    assert {p.dtype for p in m.parameters()} == {torch.float16}


def test_skipping_the_default_initialization() -> None:
    """skip_init leaves the values to a custom initialization, here an orthogonal one."""

    def scenario(impl: Implementation) -> object:
        m = impl.submodule("nn.utils").skip_init(impl.nn.Linear, 5, 3)
        impl.nn.init.orthogonal_(m.weight)
        impl.nn.init.zeros_(m.bias)
        return m

    m = scenario(MODKIT)

    assert same(scenario)[0] == "returned"
    assert type(m) is MODKIT.nn.Linear
    assert torch.allclose(m.weight @ m.weight.T, torch.eye(3), atol=1e-6)
    assert {p.device.type for p in m.parameters()} == {"cpu"}


def test_skip_init_draws_no_random_numbers(impl: Implementation) -> None:
    """The layer's own initialization does not run: the generator is where it was."""
    before = torch.get_rng_state()
    impl.submodule("nn.utils").skip_init(impl.own.Linear, 5, 3)

    assert torch.equal(torch.get_rng_state(), before)


def test_dtype_applies_to_floating_point_buffers_too(impl: Implementation) -> None:
    """A half-precision BatchNorm has half-precision running statistics, and an integer counter."""
    m = impl.own.BatchNorm2d(3, dtype=torch.half)

    assert str(m.running_mean) == "tensor([0., 0., 0.], dtype=torch.float16)"
    assert m.running_var.dtype == torch.float16
    assert m.num_batches_tracked.dtype == torch.int64


def forward_pre_hook(m, inputs):
    """Add one to the input."""
    return inputs[0] + 1.0


def forward_hook(m, inputs, output):
    """Make a residual connection."""
    return output + inputs[0]


def backward_hook(m, grad_inputs, grad_outputs):
    """Replace all gradients with respect to inputs by 42."""
    return [torch.ones_like(gi) * 42.0 for gi in grad_inputs]


def hook_example(impl: Implementation) -> dict[str, torch.Tensor]:
    """Run the note's hook example and collect what it prints."""
    torch.manual_seed(1)
    m = impl.own.Linear(3, 3)
    x = torch.randn(2, 3, requires_grad=True)
    printed = {"no forward hooks": m(x)}
    forward_pre_hook_handle = m.register_forward_pre_hook(forward_pre_hook)
    printed["forward pre hook"] = m(x)
    forward_hook_handle = m.register_forward_hook(forward_hook)
    printed["both forward hooks"] = m(x)
    forward_pre_hook_handle.remove()
    forward_hook_handle.remove()
    printed["after removing"] = m(x)
    m(x).sum().backward()
    printed["x.grad with no backwards hook"] = x.grad.clone()
    m.zero_grad()
    x.grad.zero_()
    m.register_full_backward_hook(backward_hook)
    m(x).sum().backward()
    printed["x.grad with backwards hook"] = x.grad
    return printed


# Output printed in the note, which is determined by its seed.
PRINTED = {
    "no forward hooks": [[-0.5059, -0.8158, 0.2390], [-0.0043, 0.4724, -0.1714]],
    "forward pre hook": [[-0.5752, -0.7421, 0.4942], [-0.0736, 0.5461, 0.0838]],
    "both forward hooks": [[-1.0980, 0.6396, 0.4666], [0.3634, 0.6538, 1.0256]],
    "after removing": [[-0.5059, -0.8158, 0.2390], [-0.0043, 0.4724, -0.1714]],
    "x.grad with no backwards hook": [[0.4497, -0.5046, 0.3146]] * 2,
    "x.grad with backwards hook": [[42.0, 42.0, 42.0]] * 2,
}


@pytest.mark.parametrize("step", PRINTED)
def test_hook_example_prints_the_values_of_the_note(impl: Implementation, step: str) -> None:
    """Forward and backward hooks give the very numbers that the note shows."""
    torch.testing.assert_close(
        hook_example(impl)[step].detach(), torch.tensor(PRINTED[step]), atol=5.1e-5, rtol=0.0
    )
    assert sorted(hook_example(impl)) == sorted(PRINTED)


def test_hook_example_is_the_same_to_the_last_bit() -> None:
    """All six tensors of the hook example are equal on both implementations."""
    assert same(hook_example)[0] == "returned"


def test_hook_example_names_the_nodes_of_the_note(impl: Implementation) -> None:
    """The outputs come from the autograd nodes that the note shows."""
    printed = hook_example(impl)

    assert [printed[step].grad_fn.name() for step in list(PRINTED)[:4]] == [
        "AddmmBackward0",
        "AddmmBackward0",
        "AddBackward0",
        "AddmmBackward0",
    ]
