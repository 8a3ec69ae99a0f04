import copy

import pytest
import torch

from tests.cases import for_each
from tests.helpers import Implementation, clean_global_hooks, same
from tests.parity.hooks.tools import noting, returning


KINDS = pytest.mark.parametrize(
    ("registrar", "make", "register"),
    [
        (
            "register_module_parameter_registration_hook",
            lambda impl: impl.own.Parameter(torch.ones(1)),
            "register_parameter",
        ),
        (
            "register_module_buffer_registration_hook",
            lambda impl: impl.own.Buffer(torch.ones(1)),
            "register_buffer",
        ),
        (
            "register_module_module_registration_hook",
            lambda impl: impl.Module(),
            "add_module",
        ),
    ],
    ids=["parameter", "buffer", "module"],
)


def watch(impl: Implementation, log: list[object]) -> None:
    """Note every registration as (kind, name, whether the value is None)."""
    impl.register_module_parameter_registration_hook(
        lambda _, name, value: log.append(("parameter", name, value is None))
    )
    impl.register_module_buffer_registration_hook(
        lambda _, name, value: log.append(("buffer", name, value is None))
    )
    impl.register_module_module_registration_hook(
        lambda _, name, value: log.append(("module", name, value is None))
    )


@KINDS
@pytest.mark.parametrize("by_assignment", [False, True], ids=["method", "assignment"])
def test_hook_gets_the_module_the_name_and_the_value(
    impl: Implementation, registrar: str, make, register: str, by_assignment: bool
) -> None:
    """A registration hook is called with (module, name, value), before it is stored (rule 40)."""
    calls: list[tuple[object, ...]] = []
    stored: list[bool] = []
    module, value = impl.Module(), make(impl)

    def hook(*received: object) -> None:
        calls.append(received)
        stored.append(hasattr(module, "x"))

    getattr(impl, registrar)(hook)
    if by_assignment:
        module.x = value
    else:
        getattr(module, register)("x", value)

    assert len(calls) == 1
    assert calls[0][0] is module
    assert calls[0][1] == "x"
    assert calls[0][2] is value
    assert stored == [False]
    assert module.x is value


@KINDS
@pytest.mark.parametrize("by_assignment", [False, True], ids=["method", "assignment"])
def test_hooks_may_replace_the_value_and_chain(
    impl: Implementation, registrar: str, make, register: str, by_assignment: bool
) -> None:
    """A returned value is what the next hook sees and, in the end, what is stored (rule 40)."""
    seen: list[object] = []
    first, last = make(impl), make(impl)
    getattr(impl, registrar)(returning(first))
    getattr(impl, registrar)(returning(None))
    getattr(impl, registrar)(lambda _, name, value: seen.append(value))
    getattr(impl, registrar)(returning(last))
    module, value = impl.Module(), make(impl)
    if by_assignment:
        module.x = value
    else:
        getattr(module, register)("x", value)

    assert len(seen) == 1
    assert seen[0] is first
    assert module.x is last


def test_parameter_hook_is_not_called_for_none(impl: Implementation) -> None:
    """A None parameter is stored without asking the hooks (rule 40)."""
    log: list[object] = []
    watch(impl, log)
    module = impl.Module()
    module.register_parameter("a", None)
    module.b = impl.own.Parameter(torch.ones(1))
    module.b = None

    assert log == [("parameter", "b", False)]


def test_buffer_hook_is_called_for_none_too(impl: Implementation) -> None:
    """register_buffer, assignment and nn.Buffer all ask the hooks, None included (rule 40)."""
    log: list[object] = []
    watch(impl, log)
    module = impl.Module()
    module.register_buffer("a", None)
    module.a = torch.ones(1)
    module.a = None
    module.b = impl.own.Buffer(torch.ones(1))
    module.b = torch.zeros(1)

    assert log == [
        ("buffer", "a", True),
        ("buffer", "a", False),
        ("buffer", "a", True),
        ("buffer", "b", False),
        ("buffer", "b", False),
    ]


def test_module_hook_is_called_for_none_too(impl: Implementation) -> None:
    """add_module, register_module and assignment all ask the hooks, None included (rule 40)."""
    log: list[object] = []
    watch(impl, log)
    module = impl.Module()
    module.add_module("a", None)
    module.register_module("b", impl.Module())
    module.b = None
    module.c = impl.Module()

    assert log == [
        ("module", "a", True),
        ("module", "b", False),
        ("module", "b", True),
        ("module", "c", False),
    ]


@for_each(
    ("registrar", "method", "name", "value"),
    [
        ("parameter", "register_parameter", "a.b", torch.nn.Parameter(torch.ones(1))),
        ("parameter", "register_parameter", "", torch.nn.Parameter(torch.ones(1))),
        ("parameter", "register_parameter", "ok", torch.ones(1)),
        ("parameter", "register_parameter", "training", torch.nn.Parameter(torch.ones(1))),
        ("buffer", "register_buffer", "a.b", torch.ones(1)),
        ("buffer", "register_buffer", "ok", "text"),
        ("module", "add_module", "a.b", torch.nn.Module()),
        ("module", "add_module", "ok", "text"),
    ],
)
def test_hooks_run_after_validation(impl, registrar, method, name, value) -> None:
    """A refused member never reaches a registration hook (rule 40)."""
    log: list[object] = []
    getattr(impl, f"register_module_{registrar}_registration_hook")(noting(log, "ran"))
    with pytest.raises((TypeError, KeyError)):
        getattr(impl.Module(), method)(name, value)

    assert log == []


def test_hooks_run_for_the_members_of_layers(impl: Implementation) -> None:
    """Building a layer or a container registers its members through the hooks (rule 40)."""
    log: list[object] = []
    watch(impl, log)
    impl.own.Sequential(impl.own.BatchNorm1d(1))

    assert log == [
        ("parameter", "weight", False),
        ("parameter", "bias", False),
        ("buffer", "running_mean", False),
        ("buffer", "running_var", False),
        ("buffer", "num_batches_tracked", False),
        ("module", "0", False),
    ]


def test_removed_hook_is_no_longer_asked(impl: Implementation) -> None:
    """After its handle's block a registration hook is gone (rule 40)."""
    log: list[object] = []
    module = impl.Module()
    with impl.register_module_parameter_registration_hook(noting(log, "ran")):
        module.a = impl.own.Parameter(torch.ones(1))
    module.b = impl.own.Parameter(torch.ones(1))

    assert log == ["ran"]


def test_hook_that_raises_keeps_the_value_out(impl: Implementation) -> None:
    """An exception from a hook reaches the caller; the new value is not stored (rule 40)."""

    def veto(*_: object) -> None:
        raise PermissionError("no")

    module = impl.Module()
    impl.register_module_parameter_registration_hook(veto)
    with pytest.raises(PermissionError):
        module.register_parameter("w", impl.own.Parameter(torch.ones(1)))

    assert dict(module.named_parameters()) == {}


def test_direct_writes_do_not_fire(impl: Implementation) -> None:
    """Writing into the tables of a module asks no hook (rule 41)."""
    log: list[object] = []
    watch(impl, log)
    module = impl.Module()
    module._parameters["w"] = impl.own.Parameter(torch.ones(1))
    module._buffers["b"] = torch.ones(1)
    module._modules["c"] = impl.Module()

    assert log == []


def filled(impl: Implementation) -> torch.nn.Module:
    """Make a module with one member of each kind."""
    module = impl.Module()
    module.w = impl.own.Parameter(torch.ones(1))
    module.register_buffer("b", torch.ones(1))
    module.c = impl.own.Identity()
    return module


@for_each(
    "action",
    [
        lambda module: module.double(),
        lambda module: module.to("meta"),
        lambda module: module.to_empty(device="cpu"),
        lambda module: module._apply(lambda tensor: tensor + 1),
        lambda module: module.load_state_dict(module.state_dict()),
        copy.deepcopy,
        copy.copy,
        lambda module: module.requires_grad_(requires_grad=False),
        lambda module: module.train(mode=False),
        lambda module: delattr(module, "w"),
    ],
    ids=[
        "double",
        "meta",
        "to_empty",
        "_apply",
        "load",
        "deepcopy",
        "copy",
        "requires_grad_",
        "train",
        "delattr",
    ],
)
def test_operations_that_register_nothing_do_not_fire(impl: Implementation, action) -> None:
    """Conversion, copying loads, deepcopy and deletion ask no hook (rule 41)."""
    log: list[object] = []
    module = filled(impl)
    watch(impl, log)
    action(module)

    assert log == []


def test_assigning_load_fires(impl: Implementation) -> None:
    """load_state_dict(assign=True) sets attributes, which asks the hooks (rule 41)."""
    log: list[object] = []
    module = filled(impl)
    state = filled(impl).state_dict()
    watch(impl, log)
    module.load_state_dict(state, assign=True)

    assert log == [("parameter", "w", False), ("buffer", "b", False)]


def test_set_submodule_fires(impl: Implementation) -> None:
    """set_submodule assigns the child, which asks the module hooks (rule 41)."""
    log: list[object] = []
    module = filled(impl)
    child = impl.Module()
    watch(impl, log)
    module.set_submodule("c", child)

    assert log == [("module", "c", False)]
    assert module.c is child


def test_assignment_goes_through_the_instances_own_methods(impl: Implementation) -> None:
    """Assignment calls overridden register_parameter and register_buffer, no other (rule 42)."""
    log: list[object] = []

    class Overrides(impl.Module):
        def register_parameter(self, name, param):
            log.append(("register_parameter", name))
            super().register_parameter(name, param)

        def register_buffer(self, name, tensor, persistent=True):
            log.append(("register_buffer", name, persistent))
            super().register_buffer(name, tensor, persistent)

        def add_module(self, name, module):
            log.append(("add_module", name))
            super().add_module(name, module)

        def register_module(self, name, module):
            log.append(("register_module", name))
            super().register_module(name, module)

    module = Overrides()
    module.w = impl.own.Parameter(torch.ones(1))
    module.w = None
    module.b = impl.own.Buffer(torch.ones(1), persistent=False)
    module.b = torch.ones(1)
    module.c = impl.Module()
    module.c = None

    assert log == [
        ("register_parameter", "w"),
        ("register_parameter", "w"),
        ("register_buffer", "b", False),
        ("register_buffer", "b", False),
    ]

    log.clear()
    module.register_module("d", impl.Module())

    assert log == [("register_module", "d"), ("add_module", "d")]


def test_register_buffer_override_without_persistent(impl: Implementation) -> None:
    """An override that does not know `persistent` is called without it (rule 42)."""
    log: list[str] = []

    class Old(impl.Module):
        def register_buffer(self, name, tensor):
            log.append(name)
            super().register_buffer(name, tensor)

    module = Old()
    module.b = impl.own.Buffer(torch.ones(1))
    module.b = torch.zeros(1)

    assert log == ["b", "b"]
    assert list(module.state_dict()) == ["b"]


def test_register_buffer_override_without_persistent_refuses_non_persistent_ones() -> None:
    """Such an override cannot take a non-persistent buffer: torch's error (rule 42)."""

    def scenario(impl: Implementation) -> None:
        class Old(impl.Module):
            def register_buffer(self, name, tensor):
                super().register_buffer(name, tensor)

        Old().b = impl.own.Buffer(torch.ones(1), persistent=False)

    assert same(scenario)[:2] == ("raised", "RuntimeError")


@pytest.mark.parametrize("persistent", [False, True])
def test_instance_level_register_buffer_is_used(impl: Implementation, persistent: bool) -> None:
    """A register_buffer assigned to the instance is the one that setattr calls (rule 42)."""
    calls: list[object] = []
    module = impl.Module()
    module.register_buffer = lambda name, tensor, persistent: calls.append((name, persistent))
    module.b = impl.own.Buffer(torch.ones(1), persistent=persistent)

    assert calls == [("b", persistent)]
    assert "b" not in module._buffers


@KINDS
def test_whole_sequence_of_registrations_is_the_same(registrar: str, make, register: str) -> None:
    """A hook that replaces members gives the same module on both implementations (rule 40)."""

    def scenario(impl: Implementation) -> object:
        with clean_global_hooks():
            replacement = make(impl)
            getattr(impl, registrar)(
                lambda _, name, value: replacement if name == "replaced" else None
            )
            module = impl.Module()
            for name in ("kept", "replaced"):
                getattr(module, register)(name, make(impl))
            return module, module.replaced is replacement

    assert same(scenario)[0] == "returned"
