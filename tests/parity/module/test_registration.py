import pytest
import torch
from packaging.version import Version

from tests.cases import for_each
from tests.helpers import Implementation, same
from tests.models import child_leaf, empty, scaling, tensors
from tests.parity.module.contents import TensorLike, where
from tests.parity.module.kinds import VALUES, host


def test_deletion_forgets_that_a_buffer_was_not_persistent(impl: Implementation) -> None:
    """A name used again after the deletion of a non-persistent buffer is persistent."""
    module = empty(impl)
    module.register_buffer("b", torch.zeros(1), persistent=False)
    del module.b
    module.register_buffer("b", torch.zeros(1))

    assert list(module.state_dict()) == ["b"]


def test_the_registered_objects_are_kept(impl: Implementation) -> None:
    """Registration stores the very objects, whichever way they come in."""
    module = empty(impl)
    parameter, buffer, child = torch.nn.Parameter(torch.ones(1)), torch.ones(1), child_leaf(impl)
    module.register_parameter("p", parameter)
    module.register_buffer("b", buffer)
    module.register_module("c", child)
    module.p2, module.b2, module.c2 = parameter, torch.nn.Buffer(buffer), child

    assert module.p is module.p2 is parameter
    assert module.b is buffer
    assert module._buffers["b2"] is module.b2
    assert module.c is module.c2 is child


def test_assignment_keeps_the_place_in_the_order(impl: Implementation) -> None:
    """A new value for a registered name stays at its place; a name added again goes last."""
    module = empty(impl)
    for name in "abc":
        setattr(module, name, torch.nn.Parameter(torch.zeros(1)))
    module.a = torch.nn.Parameter(torch.ones(1))
    module.b = None
    kept = list(module._parameters)
    del module.b
    module.b = torch.nn.Parameter(torch.ones(1))

    assert kept == ["a", "b", "c"]
    assert list(module._parameters) == ["a", "c", "b"]


@for_each("kind", ["parameter", "buffer", "loose buffer", "module"])
def test_an_emptied_slot_can_be_filled_again(kind):
    """``None`` keeps a name registered, and a later value of its kind fills it."""

    def scenario(impl):
        module = host(impl, kind)
        module.x = None
        emptied = where(module, "x")
        module.x = VALUES["tensor" if "buffer" in kind else kind](impl)
        return [emptied, where(module, "x"), list(module.state_dict())]

    assert same(scenario)[0] == "returned"


@for_each("again", ["tensor", "buffer", "loose buffer"])
@for_each("persistent", [True, False])
def test_persistence_after_assignment(persistent, again):
    """A plain tensor keeps the persistence of the buffer it replaces; ``nn.Buffer`` sets its own."""

    def scenario(impl):
        module = empty(impl)
        module.register_buffer("x", torch.zeros(1), persistent=persistent)
        module.x = VALUES[again](impl)
        return where(module, "x")

    assert same(scenario)[0] == "returned"


def test_registering_a_buffer_again_makes_it_persistent(impl: Implementation) -> None:
    """The default ``persistent=True`` counts also for a name that was not persistent."""
    module = empty(impl)
    module.register_buffer("x", torch.zeros(1), persistent=False)
    module.register_buffer("x", torch.ones(1))

    assert module._non_persistent_buffers_set == set()


@pytest.mark.parametrize("requires_grad", [True, False])
def test_a_buffer_may_have_any_gradient_state(impl: Implementation, requires_grad) -> None:
    """``nn.Buffer`` and plain tensors are stored with the ``requires_grad`` they have."""
    module = empty(impl)
    tensor = torch.ones(2, requires_grad=requires_grad)
    module.register_buffer("x", tensor)

    assert module.x is tensor
    assert [name for name, _ in module.named_buffers()] == ["x"]
    assert list(module.parameters()) == []


def test_an_uninitialized_parameter_is_a_parameter(impl: Implementation) -> None:
    """Uninitialized parameters and buffers register like others."""
    module = empty(impl)
    module.p = torch.nn.UninitializedParameter()
    module.register_buffer("b", torch.nn.UninitializedBuffer())

    assert list(module._parameters) == ["p"]
    assert list(module._buffers) == ["b"]


def test_a_tensor_subclass_wrapped_as_parameter_is_registered(impl: Implementation) -> None:
    """A custom tensor that ``Parameter`` accepts counts as a parameter of the module."""

    class Special(torch.Tensor):
        pass

    module = empty(impl)
    module.p = torch.nn.Parameter(torch.ones(2).as_subclass(Special))

    assert list(module._parameters) == ["p"]
    assert type(module.p) is Special


def test_a_stand_in_for_a_module_is_registered():
    """An object whose ``__class__`` says that it is a module is stored as a child."""
    from unittest.mock import Mock

    def scenario(impl):
        module = empty(impl)
        module.child = Mock(spec=torch.nn.Module)
        return list(module._modules)

    assert same(scenario) == ("returned", ("list", [("str", "'child'")]))


@for_each("value", ["parameter", "tensor", "module", "None"])
def test_names_with_dots_or_without_letters_by_assignment(value):
    """Assignment takes or refuses names that no attribute syntax can spell, as in torch."""

    def scenario(impl):
        found = []
        for name in ("a.b", "", "0", "with space", "ä"):
            module = empty(impl)
            try:
                setattr(module, name, VALUES[value](impl))
            except KeyError as error:
                found.append((name, str(error)))
            else:
                found.append((name, where(module, name)))
        return found

    assert same(scenario)[0] == "returned"


def test_an_override_of_register_parameter_sees_assignments(impl: Implementation) -> None:
    """Assigning a parameter, or ``None`` to its slot, goes through the class's own method."""
    log = []

    class Logged(impl.Module):
        def register_parameter(self, name, param):
            log.append((name, param is None))
            super().register_parameter(name, param)

    module = Logged()
    module.w = torch.nn.Parameter(torch.ones(1))
    module.w = None
    module.other = 3

    assert log == [("w", False), ("w", True)]
    assert module._parameters == {"w": None}


def test_an_instance_level_register_parameter_sees_assignments(impl: Implementation) -> None:
    """A callable stored on the instance replaces the method for assignments as well."""
    log = []
    module = empty(impl)
    module.register_parameter = lambda name, param: log.append(name)
    module.w = torch.nn.Parameter(torch.ones(1))

    assert log == ["w"]
    assert module._parameters == {}


def test_overrides_of_add_module_do_not_see_assignments(impl: Implementation) -> None:
    """Assigning a child writes the registry itself; only explicit calls reach the methods."""
    log = []

    class Logged(impl.Module):
        def add_module(self, name, module):
            log.append(("add", name))
            super().add_module(name, module)

        def register_module(self, name, module):
            log.append(("register", name))
            super().register_module(name, module)

    module = Logged()
    module.a = child_leaf(impl)
    module.add_module("b", child_leaf(impl))
    module.register_module("c", child_leaf(impl))

    assert log == [("add", "b"), ("register", "c"), ("add", "c")]
    assert list(module._modules) == ["a", "b", "c"]


def override_with_persistent(log):
    """Build an override with upstream's signature."""

    def register_buffer(self, name, tensor, persistent=True):
        log.append((name, persistent))
        super(type(self), self).register_buffer(name, tensor, persistent)

    return register_buffer


def override_without_persistent(log):
    """Build an override from before ``persistent`` existed."""

    def register_buffer(self, name, tensor):
        log.append((name,))
        super(type(self), self).register_buffer(name, tensor)

    return register_buffer


def override_with_keywords(log):
    """Build an override that hands on any keyword."""

    def register_buffer(self, name, tensor, **keywords):
        log.append((name, sorted(keywords)))
        super(type(self), self).register_buffer(name, tensor, **keywords)

    return register_buffer


BUFFERS = ("tensor", "buffer", "loose buffer", "None", "tensor-like", "int")


@for_each("value", [value for value in BUFFERS if value in VALUES])
@for_each("loose", [False, True])
@for_each(
    "override", [override_with_persistent, override_without_persistent, override_with_keywords]
)
def test_assignment_calls_an_override_of_register_buffer(override, loose, value):
    """The override is called with ``persistent`` only if it takes it, else refused if needed."""

    def scenario(impl):
        log = []
        host_class = type("Host", (impl.Module,), {"register_buffer": override(log)})
        module = host_class()
        impl.Module.register_buffer(module, "x", torch.zeros(1), persistent=not loose)
        try:
            module.x = VALUES[value](impl)
        except Exception as error:
            log.append((type(error).__name__, str(error)))
        return [log, where(module, "x")]

    assert same(scenario)[0] == "returned"


@pytest.mark.skipif(
    Version(torch.__version__) < Version("2.9"), reason="register_buffer() takes tensors alone"
)
def test_an_object_like_a_tensor_may_be_a_buffer(impl: Implementation) -> None:
    """An object that takes part in torch's function protocol is registered and assigned."""
    module, first, second = impl.Module(), TensorLike(), TensorLike()
    module.register_buffer("x", first)
    registered = module.x
    module.x = second

    assert registered is first
    assert module._buffers == {"x": second}


def test_an_instance_level_register_buffer_sees_assignments():
    """A callable on the instance is asked for ``persistent`` by its signature as well."""

    def scenario(impl):
        log = []
        module = empty(impl)
        module.register_buffer = lambda name, tensor: log.append(name)
        module.b = torch.nn.Buffer(torch.ones(1))
        try:
            module.c = torch.nn.Buffer(torch.ones(1), persistent=False)
        except RuntimeError as error:
            log.append(str(error))
        module.register_buffer = lambda name, tensor, persistent: log.append((name, persistent))
        module.d = torch.nn.Buffer(torch.ones(1), persistent=False)
        return log, list(module._buffers)

    assert same(scenario)[0] == "returned"


@pytest.mark.parametrize("method", ["register_parameter", "register_buffer"])
def test_a_replacement_of_the_base_method_is_reached(impl, method, monkeypatch):
    """Tools that patch ``register_*`` on ``torch.nn.Module`` see assignments and direct calls."""
    log = []
    original = getattr(torch.nn.Module, method)

    def patched(self, name, *args, **kwargs):
        log.append(name)
        return original(self, name, *args, **kwargs)

    monkeypatch.setattr(torch.nn.Module, method, patched)
    module = empty(impl)
    kind = torch.nn.Parameter if method == "register_parameter" else torch.nn.Buffer
    module.assigned = kind(torch.ones(1))
    getattr(module, method)("called", kind(torch.ones(1)))

    assert log == ["assigned", "called"]


def test_a_replacement_of_the_base_method_may_change_the_value(impl, monkeypatch):
    """A patch that moves what is registered to the meta device decides what is stored."""
    original = torch.nn.Module.register_parameter

    def patched(self, name, param):
        original(self, name, param)
        self._parameters[name] = torch.nn.Parameter(param.to("meta"))

    monkeypatch.setattr(torch.nn.Module, "register_parameter", patched)
    module = child_leaf(impl)

    assert module.weight.is_meta


@pytest.mark.parametrize("kind", ["parameter", "buffer", "module"])
@pytest.mark.parametrize("asked", ["property", "getattr"])
def test_a_name_that_is_taken_is_asked_for_once(impl: Implementation, kind, asked) -> None:
    """A property may compute something, such as a step of a spectral norm's power iteration."""
    reads = []

    class Lazy(impl.Module):
        if asked == "property":

            @property
            def weight(self):
                reads.append("weight")
                return torch.ones(1)

        else:

            def __getattr__(self, name):
                reads.append(name)
                return torch.ones(1)

    register = getattr(Lazy(), f"register_{kind}")
    with pytest.raises(KeyError, match="attribute 'weight' already exists"):
        register("weight", None)

    assert reads == ["weight"]


@pytest.mark.parametrize("kind", ["parameter", "buffer", "module"])
def test_a_name_is_asked_for_once_for_a_value_that_is_refused(impl: Implementation, kind) -> None:
    """A `__getattr__` of the class sees each lookup, of which torch makes at most one."""
    reads = []

    class Watched(impl.Module):
        def __getattr__(self, name):
            reads.append(name)
            return super().__getattr__(name)

    register = getattr(Watched(), f"register_{kind}")
    reads.clear()
    with pytest.raises(TypeError):
        register("weight", "text")

    assert reads == (["weight"] if kind != "module" else [])


EMPTY = pytest.mark.parametrize("method", ["register_parameter", "register_buffer"])


@EMPTY
@pytest.mark.parametrize("move", ["double", "to meta", "to_empty", "share_memory"])
def test_none_is_ignored_by_operations(impl: Implementation, method: str, move: str) -> None:
    """Operations that run on parameters or buffers skip a member registered as None."""
    operations = {
        "double": lambda module: module.double(),
        "to meta": lambda module: module.to("meta"),
        "to_empty": lambda module: module.to_empty(device="cpu"),
        "share_memory": lambda module: module.share_memory(),
    }
    module = scaling(impl)
    getattr(module, method)("empty", None)
    operations[move](module)

    assert module.empty is None
    assert list(tensors(module)) == [module.factor]


def test_non_persistent_buffer_differs_in_the_state_dict_only(impl: Implementation) -> None:
    """A non-persistent buffer is listed, converted and accessed like a persistent one."""
    persistent, transient = impl.nn.Module(), impl.nn.Module()
    persistent.register_buffer("b", torch.ones(1))
    transient.register_buffer("b", torch.ones(1), persistent=False)
    for module in (persistent, transient):
        module.double()

        assert [name for name, _ in module.named_buffers()] == ["b"]
        assert module.get_buffer("b") is module.b
        assert module.b.dtype == torch.float64

    assert list(persistent.state_dict()) == ["b"]
    assert list(transient.state_dict()) == []
