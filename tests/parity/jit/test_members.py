import copy
import io
import re

import pytest
import torch

from tests.cases import for_each
from tests.helpers import MODKIT, TORCH, outcome, same
from tests.parity.jit.networks import KINDS, build, inputs, jit_tests, make_net, reloaded


pytestmark = jit_tests


def normal(value):
    """Leave out of all texts what differs by design: the library, and numbers of the compiler."""
    if isinstance(value, str):
        value = re.sub(r"(RecursiveScriptModule|TopLevelTracedModule)", "ScriptModule", value)
        value = re.sub(r"__torch__\.modkit\.", "__torch__.torch.", value)
        return re.sub(r"___torch_mangle_\d+\.| at: 0x\w+", "", value)
    if isinstance(value, (list, tuple)):
        return type(value)(normal(item) for item in value)
    return value


def tensors(pairs):
    """Name each tensor with its values; torch's loaded parameters are not Parameters."""
    return [(name, tensor.detach(), tensor.requires_grad) for name, tensor in pairs]


def state(module):
    """Describe all that a module holds."""
    return tensors(module.named_parameters()), tensors(module.named_buffers())


def names(modules):
    """Name the classes that modules were compiled from."""
    return [module.original_name for module in modules]


def returns_itself(module, result):
    """Describe the module after a method that is to return it."""
    return result is module, state(module)


def trained(module, **options):
    """Take gradients and drop them again."""
    module(inputs()).sum().backward()
    filled = [parameter.grad is not None for parameter in module.parameters()]
    module.zero_grad(**options)
    return filled, [p.grad for p in module.parameters()]


def applied(module):
    """Apply a function that fills weights."""
    seen = []

    @torch.no_grad()
    def fill(part):
        seen.append(part.original_name)
        for parameter in part._parameters.values():
            parameter.fill_(0.5)

    return module.apply(fill) is module, seen, module(inputs())


def replaced_parameter(module):
    """Put another parameter in the place of one."""
    new = torch.nn.Parameter(torch.ones(2))
    module.register_parameter("gain", new)
    return module.gain is new, module(inputs())


def replaced_buffer(module):
    """Put another buffer in the place of one."""
    module.register_buffer("shift", torch.zeros(2))
    return module.shift, module(inputs())


def replaced_child(impl, module, kind):
    """Put a child in the place of another one of the same compiled type."""
    child = copy.deepcopy(module).lin
    module.add_module("lin", child)
    return module.lin is child, module(inputs())


def through_buffer(impl, module):
    """Save to bytes and load."""
    loaded = impl.jit.load(io.BytesIO(module.save_to_buffer()))
    return state(loaded), loaded(inputs())


def loaded_state(impl, module, kind, **options):
    """Load the state of another one."""
    with torch.no_grad():
        other = build(impl, kind)
        for tensor in (*other.parameters(), *other.buffers()):
            tensor.add_(1)
    found = module.load_state_dict(other.state_dict(), **options)
    return found.missing_keys, found.unexpected_keys, state(module), module(inputs())


def attribute_set(module, name, value):
    """Set an attribute and read it."""
    setattr(module, name, value)
    return getattr(module, name), module(inputs())


CASES = {
    "call": lambda i, m, k: m(inputs()),
    "forward": lambda i, m, k: m.forward(inputs()),
    "attribute": lambda i, m, k: m.ratio,
    "set attribute": lambda i, m, k: attribute_set(m, "ratio", 0.5),
    "attribute of another type": lambda i, m, k: attribute_set(m, "ratio", [1]),
    "constant": lambda i, m, k: m.factor,
    "parameter": lambda i, m, k: m.gain.detach(),
    "buffer": lambda i, m, k: m.shift,
    "child": lambda i, m, k: m.lin.original_name,
    "missing attribute": lambda i, m, k: hasattr(m, "missing"),
    "training": lambda i, m, k: m.training,
    "add_module": replaced_child,
    "apply": lambda i, m, k: applied(m),
    "buffers": lambda i, m, k: (list(m.buffers()), list(m.buffers(recurse=False))),
    "children": lambda i, m, k: names(m.children()),
    "code": lambda i, m, k: m.code,
    "code_with_constants": lambda i, m, k: (
        m.code_with_constants[0],
        sorted(m.code_with_constants[1].const_mapping),
        [getattr(m.code_with_constants[1], c) for c in m.code_with_constants[1].const_mapping],
    ),
    "cpu": lambda i, m, k: returns_itself(m, m.cpu()),
    "cuda": lambda i, m, k: returns_itself(m, m.cuda()),
    "double": lambda i, m, k: returns_itself(m, m.double()),
    "eval": lambda i, m, k: (m.eval() is m, m.training, [c.training for c in m.children()]),
    "extra_repr": lambda i, m, k: m.extra_repr(),
    "float": lambda i, m, k: returns_itself(m, m.float()),
    "graph": lambda i, m, k: len(str(m.graph).splitlines()),
    "half": lambda i, m, k: returns_itself(m, m.half()),
    "inlined_graph": lambda i, m, k: [node.kind() for node in m.inlined_graph.nodes()],
    "load_state_dict": loaded_state,
    "load_state_dict not strict": lambda i, m, k: loaded_state(i, m, k, strict=False),
    "load_state_dict of wrong keys": lambda i, m, k: m.load_state_dict({"stray": torch.ones(1)}),
    "modules": lambda i, m, k: names(m.modules()),
    "named_buffers": lambda i, m, k: (
        tensors(m.named_buffers("p")),
        tensors(m.named_buffers(recurse=False)),
    ),
    "named_children": lambda i, m, k: [(n, c.original_name) for n, c in m.named_children()],
    "named_modules": lambda i, m, k: [(n, c.original_name) for n, c in m.named_modules(prefix="p")],
    "named_parameters": lambda i, m, k: (
        tensors(m.named_parameters("p")),
        tensors(m.named_parameters(recurse=False)),
    ),
    "original_name": lambda i, m, k: m.original_name,
    "parameters": lambda i, m, k: [
        p.detach() for p in (*m.parameters(), *m.parameters(recurse=False))
    ],
    "register_buffer": lambda i, m, k: replaced_buffer(m),
    "register_parameter": lambda i, m, k: replaced_parameter(m),
    "save_to_buffer": lambda i, m, k: through_buffer(i, m),
    "share_memory": lambda i, m, k: (
        m.share_memory() is m,
        [p.is_shared() for p in m.parameters()],
    ),
    "state_dict": lambda i, m, k: [(n, t) for n, t in m.state_dict(prefix="p.").items()],
    "state_dict keep_vars": lambda i, m, k: [
        m.state_dict(keep_vars=True)[n] is p for n, p in m.named_parameters()
    ],
    "to dtype": lambda i, m, k: returns_itself(m, m.to(torch.float64)),
    "to device": lambda i, m, k: returns_itself(m, m.to("cpu")),
    "to tensor": lambda i, m, k: returns_itself(m, m.to(torch.ones(1, dtype=torch.float64))),
    "to an integer dtype": lambda i, m, k: m.to(torch.int64),
    "train": lambda i, m, k: (m.train(False) is m, m.training, m.train().training),
    "train with a wrong mode": lambda i, m, k: m.train("yes"),
    "type": lambda i, m, k: returns_itself(m, m.type(torch.float64)),
    "zero_grad": lambda i, m, k: trained(m),
    "zero_grad set_to_none": lambda i, m, k: trained(m, set_to_none=False),
}


# Torch has other errors here, which have tests of their own.
DIFFERENT = {
    ("register_buffer", "frozen"),
    ("register_buffer", "class-based"),
    ("register_parameter", "frozen"),
    ("register_parameter", "class-based"),
    ("register_buffer", "traced"),
    ("register_parameter", "traced"),
}


# Each group runs on one module, since building one takes longer than most members.
READING = (
    *("forward", "attribute", "constant", "parameter", "buffer", "child", "missing attribute"),
    *("training", "buffers", "children", "code", "code_with_constants", "extra_repr", "graph"),
    *("inlined_graph", "load_state_dict of wrong keys", "modules", "named_buffers"),
    *("named_children", "named_modules", "named_parameters", "original_name", "parameters"),
    *("save_to_buffer", "state_dict", "state_dict keep_vars"),
)
CONVERTING = (
    *("share_memory", "cpu", "cuda", "double", "float", "half", "to dtype", "to device", "type"),
    *("to tensor", "to an integer dtype"),
)


@for_each("kind", KINDS)
@for_each(
    "members",
    [READING, CONVERTING, *((name,) for name in CASES if name not in {*READING, *CONVERTING})],
)
def test_a_member_gives_what_it_gives_in_torch(members, kind):
    """Each member of the documentation gives, or raises, what torch does, for each kind of module."""
    if (*members, kind) in DIFFERENT:
        pytest.skip("test_defects.py has the difference")
    theirs, ours = (build(impl, kind) for impl in (TORCH, MODKIT))

    for member in members:
        call = CASES[member]
        expected = normal(outcome(lambda impl, call=call: call(impl, theirs, kind), TORCH))
        actual = normal(outcome(lambda impl, call=call: call(impl, ours, kind), MODKIT))
        assert actual == expected, member


@for_each("kind", KINDS)
def test_saving_in_one_and_loading_in_the_other_changes_nothing(kind):
    """Outputs, flags and values are the same after modkit, torch, modkit and torch, modkit, torch."""
    there = build(MODKIT, kind)
    back = reloaded(MODKIT, reloaded(TORCH, there))
    from_torch = reloaded(TORCH, reloaded(MODKIT, build(TORCH, kind)))

    expected = build(TORCH, kind)
    want = expected(inputs())
    for module in (back, from_torch):
        assert torch.equal(module(inputs()), want)
    assert [n for n, _ in back.named_parameters()] == [n for n, _ in expected.named_parameters()]
    assert [p.requires_grad for p in back.parameters()] == [
        p.requires_grad for p in expected.parameters()
    ]


def test_a_replaced_child_is_the_one_that_is_called(impl):
    """A child of the same compiled type that is put in by assignment computes, in C++ too."""
    module = impl.jit.script(impl.nn.Sequential(impl.nn.Linear(2, 2)))
    other = impl.jit.script(impl.nn.Linear(2, 2))
    setattr(module, "0", other)
    x = torch.ones(1, 2)

    assert torch.equal(module(x), other(x))
    assert getattr(module, "0") is other


def test_a_new_attribute_with_a_type(impl):
    """A compiled module has the value of a ``torch.jit.Attribute``, as in its class."""
    module = impl.jit.script(impl.nn.Linear(2, 2))
    module.count = impl.jit.Attribute(3, int)

    assert module.count == 3


@for_each("base", ["Sequential", "ModuleList", "ModuleDict"])
def test_containers_with_special_methods_of_their_own(base):
    """A class derived from a container may export a special method; the others stay torch's."""

    def described(impl):
        class Sized(getattr(impl.nn, base)):
            @impl.jit.export
            def __len__(self) -> int:
                return 7

            def forward(self, x):
                return x

            if base != "ModuleDict":

                @impl.jit.export
                def __contains__(self, key: str) -> bool:
                    return key == "b"

        children = {"a": impl.nn.ReLU()} if base == "ModuleDict" else [impl.nn.ReLU()]
        container = Sized(*children) if base == "Sequential" else Sized(children)
        module = impl.jit.script(container)
        first = next(iter(module))
        child = module[first] if base == "ModuleDict" else first
        found = [key for key in ("a", "b") if key in module]
        return len(module), bool(module), len(list(module)), found, child(torch.tensor(-1.0)).item()

    found = ["a" if base == "ModuleDict" else "b"]
    assert described(MODKIT) == described(TORCH) == (7, True, 1, found, 0.0)


@for_each("index", [True, torch.tensor(-1), 2, -3, "0", 1.0, None])
def test_indexes_of_a_container(index):
    """An index is anything that counts as an integer; others are refused in torch's words."""

    def item(impl):
        module = impl.jit.script(impl.nn.Sequential(impl.nn.ReLU(), impl.nn.Tanh()))
        return module[index](torch.tensor([-1.0]))

    same(item)


def test_special_methods_of_a_module_are_the_compiled_ones():
    """They run after loading too, and decide if a module is true, where torch raises."""

    def scripted(impl):
        class Bag(impl.nn.Module):
            def __init__(self):
                super().__init__()
                self.part = impl.nn.ReLU()

            def forward(self, x):
                return x

            @impl.jit.export
            def __len__(self) -> int:
                return 1  # as many as it has children, like a container

            @impl.jit.export
            def __getitem__(self, index: int) -> int:
                return index * 2

            @impl.jit.export
            def __contains__(self, key: int) -> bool:
                return key == 3

            @impl.jit.export
            def __bool__(self) -> bool:
                return self.training

        return impl.jit.script(Bag())

    ours = scripted(MODKIT)
    modules = scripted(TORCH), ours, reloaded(MODKIT, ours)

    assert [(len(m), m[3], 3 in m, 4 in m) for m in modules] == [(1, 6, True, False)] * 3
    assert [(bool(m.train()), bool(m.eval())) for m in modules[1:]] == [(True, False)] * 2


def test_a_length_alone_makes_no_container(impl):
    """A module that counts something else than its children has neither an order nor items."""

    class Counted(impl.nn.Module):
        def __init__(self):
            super().__init__()
            self.part = impl.nn.ReLU()

        def forward(self, x):
            return x

        @impl.jit.export
        def __len__(self) -> int:
            return 3

    module = impl.jit.script(Counted())
    # Loaded modules of torch do not call it.
    for each in (module, reloaded(MODKIT, module)):
        assert len(each) == 3
        with pytest.raises(NotImplementedError):
            iter(each)
        with pytest.raises(NotImplementedError):
            each[0]


def test_a_compiled_iter_is_called(impl):
    """TorchScript has no iterators, so Python refuses the list that it returns."""

    class Listed(impl.nn.Module):
        def forward(self, x):
            return x

        @impl.jit.export
        def __iter__(self) -> list[int]:
            return [5]

        @impl.jit.export
        def __len__(self) -> int:
            return 0  # as many as it has children, like a container

    module = impl.jit.script(Listed())
    for each in (module, reloaded(MODKIT, module)):
        with pytest.raises(TypeError, match="non-iterator of type 'list'"):
            iter(each)


@for_each("kind", KINDS)
def test_a_replica_is_a_module_of_the_same_type(impl, kind):
    """A replica, as ``DataParallel`` makes them, has the compiled type, the state and the code."""
    module = build(impl, kind).eval()
    replica = module._replicate_for_data_parallel()

    assert type(replica).__name__ == "RecursiveScriptModule"
    assert replica._c._type() == module._c._type()
    assert list(replica.state_dict()) == [name for name in module.state_dict() if "." not in name]
    assert replica.code == module.code


@for_each("name", ["Sequential", "ModuleList", "ModuleDict", "module"])
def test_special_methods_are_listed(name):
    """``dir()`` lists the special methods that torch lists, those of containers among them."""

    def listed(impl):
        nn = impl.nn
        module = {
            "Sequential": lambda: nn.Sequential(nn.ReLU()),
            "ModuleList": lambda: nn.ModuleList([nn.ReLU()]),
            "ModuleDict": lambda: nn.ModuleDict({"a": nn.ReLU()}),
            "module": lambda: make_net(impl),
        }[name]()
        names = dir(impl.jit.script(module))
        assert {"children", "forward"} <= {*names}
        return {each for each in names if each.startswith("__")}

    # A decorator leaves this note on a class; it is not a method.
    assert listed(TORCH) - listed(MODKIT) - {"__overloads__"} == set()


@for_each("child", ["called", "idle", "below", "below.0"])
@for_each("name", ["code", "inlined_graph", "code_with_constants"])
def test_children_of_a_traced_module_show_their_code(child, name):
    """Each child that was called while its parent was traced has the code that it has in torch."""

    def scenario(impl):
        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.called, self.idle = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
                self.below = torch.nn.Sequential(torch.nn.Linear(2, 2))

            def forward(self, x):
                return self.below(self.called(x))

        traced = impl.jit.trace(Net(), torch.ones(1, 2))
        value = getattr(traced.get_submodule(child), name, "missing")
        return re.sub(r"___torch_mangle_\d+\.|%self\.?\d*|0x\w+", "", str(value))

    assert scenario(MODKIT) == scenario(TORCH)
