import inspect

import pytest
import torch
import torch.nn.modules.module as torch_module

from tests.cases import for_each
from tests.helpers import MODKIT, TORCH, Implementation
from tests.parity.hooks.tools import GLOBAL_REGISTRARS, do_nothing, inner_tensor, noting, returning


CALL_REGISTRARS = [
    "register_module_forward_pre_hook",
    "register_module_forward_hook",
    "register_module_full_backward_pre_hook",
    "register_module_full_backward_hook",
    "register_module_backward_hook",
]


def test_every_global_registrar_is_covered_here() -> None:
    """The functions tested are all the ones that torch exports."""
    exported = [name for name in torch_module.__all__ if name.startswith("register_module_")]

    assert sorted(GLOBAL_REGISTRARS) == sorted(exported)


@for_each("registrar", GLOBAL_REGISTRARS)
def test_global_registrars_import_from_where_torch_has_them(
    impl: Implementation, registrar: str
) -> None:
    """Each function is importable from `nn.modules.module` and takes the hook by name."""
    function = getattr(impl.submodule("nn.modules.module"), registrar)
    handle = function(hook=do_nothing)

    assert handle.id in handle.hooks_dict_ref()


@for_each("registrar", GLOBAL_REGISTRARS)
def test_global_hooks_live_in_torchs_tables(registrar: str) -> None:
    """A hook registered through modkit is in torch's own table."""
    through_torch = getattr(TORCH, registrar)(do_nothing)
    through_modkit = getattr(MODKIT, registrar)(do_nothing)

    assert through_modkit.hooks_dict_ref() is through_torch.hooks_dict_ref()
    assert list(through_torch.hooks_dict_ref()) == [through_torch.id, through_modkit.id]


def test_kind_of_backward_hook_is_shared_with_torch(impl: Implementation) -> None:
    """The mark of which kind of global backward hook is in use is torch's own."""
    impl.register_module_full_backward_hook(do_nothing)

    assert torch_module._global_is_full_backward_hook is True
    with pytest.raises(RuntimeError, match="Please use only one"):
        TORCH.register_module_backward_hook(do_nothing)
    with pytest.raises(RuntimeError, match="Please use only one"):
        MODKIT.register_module_backward_hook(do_nothing)


@for_each("registrar", CALL_REGISTRARS)
@for_each("other", [TORCH, MODKIT], ids=lambda other: f"called-on-{other}")
def test_global_hooks_fire_across_implementations(
    impl: Implementation, other: Implementation, registrar: str
) -> None:
    """A global hook of either implementation fires for the modules of both."""
    log: list[str] = []

    class Viewed(other.Module):
        def forward(self, x):
            return x.view(-1)

    getattr(impl, registrar)(noting(log, "fired"))
    module = Viewed()
    module(inner_tensor()).sum().backward()

    assert log == ["fired"]


@for_each(
    ("kind", "member"),
    [
        ("parameter", torch.nn.Parameter(torch.ones(1))),
        ("buffer", torch.nn.Buffer(torch.ones(1))),
        ("module", torch.nn.Module()),
    ],
)
@for_each("other", [TORCH, MODKIT], ids=lambda other: f"called-on-{other}")
def test_registration_hooks_fire_across_implementations(
    impl: Implementation, other: Implementation, kind: str, member: object
) -> None:
    """A registration hook of either implementation is asked by the modules of both."""
    log: list[str] = []
    getattr(impl, f"register_module_{kind}_registration_hook")(noting(log, "asked"))
    other.Module().x = member

    assert log == ["asked"]


def test_global_hooks_see_every_module_of_a_call(impl: Implementation) -> None:
    """Parents and children, hooked or not, layers and containers: all fire global hooks."""
    log: list[str] = []
    network = impl.own.Sequential(impl.own.Linear(1, 1), impl.own.ReLU())
    impl.register_module_forward_pre_hook(lambda module, _: log.append(type(module).__name__))
    impl.register_module_forward_hook(
        lambda module, *_: log.append(f"{type(module).__name__} done")
    )
    network(torch.ones(1, 1))

    assert log == ["Sequential", "Linear", "Linear done", "ReLU", "ReLU done", "Sequential done"]


def test_global_hooks_see_the_parts_of_composite_layers(impl: Implementation) -> None:
    """The layers inside MultiheadAttention's owner are called as modules too."""
    seen: list[str] = []
    layer = impl.own.TransformerEncoderLayer(4, 1, dim_feedforward=4, batch_first=True)
    impl.register_module_forward_hook(lambda module, *_: seen.append(type(module).__name__))
    layer(torch.ones(1, 2, 4))

    assert seen[0] == "MultiheadAttention"
    assert seen[-1] == "TransformerEncoderLayer"
    assert seen.count("LayerNorm") == 2
    assert seen.count("Linear") == 2


def test_global_hook_removed_between_calls_no_longer_fires(impl: Implementation) -> None:
    """After `remove()` a global hook is gone for all modules."""
    log: list[str] = []
    module = impl.own.Identity()
    handle = impl.register_module_forward_hook(noting(log, "fired"))
    module(0)
    handle.remove()
    module(0)

    assert log == ["fired"]


def test_global_forward_hook_may_replace_the_output(impl: Implementation) -> None:
    """The value of a global forward hook is the output, before the module's own hooks."""
    module = impl.own.Identity()
    module.register_forward_hook(lambda _, args, out: out + 1)
    impl.register_module_forward_hook(returning(10))

    assert module(0) == 11


def test_global_full_backward_hook_may_replace_gradients(impl: Implementation) -> None:
    """Global backward hooks chain with the module's, and are chained first."""
    module = impl.own.Identity()
    module.register_full_backward_hook(lambda _, gi, go: (gi[0] + 1,))
    impl.register_module_full_backward_hook(lambda _, gi, go: (gi[0] * 10,))
    x = torch.ones(1, requires_grad=True)
    module(x).sum().backward()

    assert x.grad.item() == 11.0


def test_one_global_hook_fires_in_the_backward_of_every_layer(impl: Implementation) -> None:
    """A global full backward hook fires once per module, from the output to the input."""
    log: list[str] = []
    network = impl.own.Sequential(impl.own.Tanh(), impl.own.Sigmoid())
    impl.register_module_full_backward_hook(lambda module, *_: log.append(type(module).__name__))
    network(inner_tensor()).sum().backward()

    assert log == ["Sigmoid", "Tanh", "Sequential"]


@for_each("registrar", GLOBAL_REGISTRARS)
def test_signatures_begin_alike(registrar: str) -> None:
    """Every parameter of torch's function is there, of the same kind and default."""
    ours = inspect.signature(getattr(MODKIT, registrar)).parameters

    for name, parameter in inspect.signature(getattr(TORCH, registrar)).parameters.items():
        assert (ours[name].kind, ours[name].default) == (parameter.kind, parameter.default)
