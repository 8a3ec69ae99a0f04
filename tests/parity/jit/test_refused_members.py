import pytest
import torch

from tests.helpers import TORCH, outcome
from tests.parity.jit.networks import build, inputs, jit_tests, make_net
from tests.parity.jit.test_members import returns_itself


pytestmark = jit_tests

WRAPPED = pytest.mark.parametrize("kind", ["scripted", "loaded"])


def forward_hooked(module):
    """Run hooks around a call."""
    seen = []
    handles = [
        module.register_forward_pre_hook(lambda m, args: (args[0] * 2,)),
        module.register_forward_pre_hook(
            lambda m, args, kwargs: seen.append((len(args), list(kwargs))), with_kwargs=True
        ),
        module.register_forward_hook(lambda m, args, result: result + 1),
        module.register_forward_hook(
            lambda m, args, result: seen.append(result.shape), prepend=True, always_call=True
        ),
    ]
    first = module(inputs())
    for handle in handles:
        handle.remove()
    return first, seen, module(inputs()), seen


def backward_hooked(module):
    """Run hooks around the computation of gradients."""
    seen = []
    module.register_full_backward_pre_hook(lambda m, out: seen.append(("pre", out[0])))
    module.register_full_backward_hook(
        lambda m, grads, out: seen.append(("full", grads[0], out[0]))
    )
    x = inputs().requires_grad_()
    module(x).square().sum().backward()
    return seen, x.grad


def hooked_backward(module):
    """Run a hook of the deprecated kind, which sees the last operation alone."""
    seen = []
    module.register_backward_hook(lambda m, grads, out: seen.append(out[0]))
    with pytest.warns(FutureWarning, match="non-full backward hook"):
        result = module(inputs().requires_grad_())
    result.square().sum().backward()
    return seen


def hooked_state(module):
    """Run hooks around saving and loading the state."""
    seen = []
    module.register_state_dict_pre_hook(lambda m, prefix, keep: seen.append(("pre", prefix, keep)))
    module.register_state_dict_post_hook(lambda m, state, prefix, meta: seen.append(list(state)))
    module.register_load_state_dict_pre_hook(lambda m, state, *rest: seen.append(rest[0]))
    module.register_load_state_dict_post_hook(lambda m, keys: seen.append(keys.missing_keys))
    module.load_state_dict(module.state_dict(), strict=False)
    return seen


CASES = {
    "bfloat16": lambda m: returns_itself(m, m.bfloat16()),
    "xpu": lambda m: returns_itself(m, m.xpu()),
    "ipu": lambda m: returns_itself(m, m.ipu()),
    "mtia": lambda m: returns_itself(m, m.mtia()),
    "requires_grad_": lambda m: returns_itself(m, m.requires_grad_(False)),
    "to_empty": lambda m: returns_itself(m, m.to_empty(device="meta")),
    "get_parameter": lambda m: m.get_parameter("lin.weight") is m.lin.weight,
    "get_parameter that is a buffer": lambda m: m.get_parameter("shift"),
    "get_buffer": lambda m: m.get_buffer("norm.running_var"),
    "get_buffer that is not there": lambda m: m.get_buffer("norm.missing"),
    "get_submodule": lambda m: [m.get_submodule(name) is part for name, part in m.named_modules()],
    "forward hooks": forward_hooked,
    "full backward hooks": backward_hooked,
    "backward hook": hooked_backward,
    "state hooks": hooked_state,
}


def named(value, module):
    """Put the eager class's name in the place of the wrapper's, in an error."""
    kind, *rest = value
    if kind == "raised":
        return kind, *(text.replace(type(module).__name__, "Net") for text in rest)
    return value


@WRAPPED
@pytest.mark.parametrize("member", CASES)
def test_members_that_torch_refuses_do_what_they_do_on_any_module(impl, kind, member):
    """Documented members work on a compiled module as on the eager one, errors included."""
    module = build(impl, kind)
    expected = outcome(lambda _: CASES[member](make_net(TORCH)), TORCH)
    actual = outcome(lambda _: CASES[member](module), impl)

    actual = named(actual, module)
    if member == "get_buffer that is not there":
        expected = (*expected[:2], expected[2].replace("BatchNorm1d", type(module.norm).__name__))
        actual = (*actual[:2], actual[2].replace("Net", type(module.norm).__name__))
    assert actual == expected


@WRAPPED
def test_set_submodule_takes_what_was_compiled_from_the_same(impl, kind):
    """A child can be replaced by path by one of the same compiled type."""
    module = build(impl, kind)
    child = module.lin.__deepcopy__({})
    module.set_submodule("lin", child)

    assert module.lin is child


NAMED_BY_DYNAMO = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13),
    reason="this release of torch does not refuse",
)


@NAMED_BY_DYNAMO
def test_torch_compile_refuses_a_compiled_module(impl):
    """``torch.compile`` takes no module of TorchScript."""
    with pytest.raises(RuntimeError, match=r"does not support compiling torch\.jit\.script"):
        torch.compile(build(impl, "scripted"), backend="eager")


@NAMED_BY_DYNAMO
def test_dynamo_names_torchscript(impl):
    """In a full graph the error for a compiled child names TorchScript."""
    net = torch.nn.Sequential(build(impl, "scripted"), torch.nn.ReLU())
    torch._dynamo.reset()

    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"torch\.jit\.script"):
        torch.compile(net, backend="eager", fullgraph=True)(inputs())
