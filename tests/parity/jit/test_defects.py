import copy
import io
from pathlib import Path

import pytest
import torch

from tests.cases import for_each
from tests.helpers import MODKIT, TORCH
from tests.parity.jit.networks import build, inputs, jit_tests, make_net, reloaded


pytestmark = jit_tests

COMPILED = ("scripted", "loaded", "traced", "class-based")


def with_a_transient_buffer(impl):
    """Build a network with a buffer that is not part of its state."""

    class Net(impl.nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = impl.nn.Linear(3, 3)
            self.lin.register_buffer("cache", torch.ones(3), persistent=False)
            self.register_buffer("mask", torch.ones(3), persistent=False)

        def forward(self, x):
            return self.lin(x) * self.mask

    return Net()


def with_a_shared_child(impl):
    """Build a network that has one layer in three places, one of them deeper."""

    class Net(impl.nn.Module):
        def __init__(self):
            super().__init__()
            self.first = impl.nn.Linear(3, 3)
            self.second = self.first
            self.deep = impl.nn.Sequential(self.first, impl.nn.ReLU())

        def forward(self, x):
            return self.deep(self.second(self.first(x)))

    return Net()


def with_containers(impl):
    """Build a network of a list, a dict and a sequence of layers."""

    class Net(impl.nn.Module):
        def __init__(self):
            super().__init__()
            self.items = impl.nn.ModuleList([impl.nn.Linear(3, 3), impl.nn.ReLU()])
            self.named = impl.nn.ModuleDict({"a": impl.nn.Linear(3, 3), "b": impl.nn.Tanh()})
            self.steps = impl.nn.Sequential(impl.nn.Linear(3, 3), impl.nn.Sigmoid())

        def forward(self, x):
            for item in self.items:
                x = item(x)
            for part in self.named.values():
                x = part(x)
            return self.steps(x)

    return Net()


@pytest.mark.parametrize("kind", COMPILED)
def test_save_takes_an_open_file(impl, kind, tmp_path, monkeypatch):
    """The method writes to a file that is open, and makes none of its own."""
    monkeypatch.chdir(tmp_path)
    buffer = io.BytesIO()
    module = build(impl, kind)
    module.save(buffer)

    assert list(Path.cwd().iterdir()) == []
    assert torch.equal(
        TORCH.jit.load(io.BytesIO(buffer.getvalue())).eval()(inputs()), module.eval()(inputs())
    )


@pytest.mark.parametrize("kind", COMPILED)
def test_a_deep_copy_can_be_trained(impl, kind):
    """The parameters of a copy are leaves, Parameters, with gradients of their own."""
    module = build(impl, kind)
    module(inputs()).square().sum().backward()
    copied, gradient = copy.deepcopy([module, module.gain.grad])
    before = copied.gain.grad.clone()
    optimizer = torch.optim.SGD(copied.parameters(), lr=0.1)
    optimizer.step()

    assert all(type(p) is torch.nn.Parameter and p.is_leaf for p in copied.parameters())
    assert torch.equal(before, module.gain.grad)
    assert copied.gain.grad is gradient is not module.gain.grad
    assert not torch.equal(copied.gain, module.gain)


def test_a_deep_copy_keeps_ties(impl):
    """Parameters, and children, that are one in a module are one in its copy, and no others."""
    module = impl.jit.script(with_a_shared_child(impl))
    copied = copy.deepcopy(module)

    assert copied.first is copied.second is copied.deep[0]
    assert copied.first.weight is copied.deep[0].weight
    assert copied.first.weight is not module.first.weight


def test_a_deep_copy_keeps_the_class_and_what_is_in_python(impl):
    """A copy of a class-based module is one, with its hooks and its plain attributes."""
    module = build(impl, "class-based")
    module.note = ["text"]
    calls = []
    module.register_forward_hook(lambda *_: calls.append(1))
    copied = copy.deepcopy(module)
    copied(inputs())

    assert type(copied) is type(module)
    assert copied.note == ["text"]
    assert copied.note is not module.note
    assert calls == [1]


def test_a_module_can_be_copied_by_its_constructor(impl):
    """A deep copy of a module that is not compiled yet has its class, and tensors of its own."""
    copies = []

    class Net(impl.jit.ScriptModule):
        def __init__(self):
            super().__init__()
            self.lin = impl.nn.Linear(3, 3)
            copies.append(copy.deepcopy(self))
            make, arguments, *_ = self.__reduce_ex__(4)
            copies.append(make(*arguments))

        @impl.jit.script_method
        def forward(self, x):
            return self.lin(x)

    module = Net()
    copied, pickled = copies

    assert type(copied) is type(pickled) is Net
    assert torch.equal(copied.lin.weight, module.lin.weight)
    assert copied.lin.weight is not module.lin.weight


def test_loaded_parameters_are_parameters(impl):
    """A Parameter is one after loading too, and stays tied and unlike buffers."""
    net = make_net(impl)
    net.lin.bias.requires_grad_(False)
    net.lin.register_parameter("again", net.gain)
    loaded = reloaded(impl, impl.jit.script(net))

    assert loaded.lin.again is loaded.gain
    assert {type(p) for p in loaded.parameters()} == {torch.nn.Parameter}
    assert [p.requires_grad for p in loaded.parameters()] == [
        p.requires_grad for p in net.parameters()
    ]
    assert loaded.to("meta").gain.is_meta


@pytest.mark.parametrize("load", [False, True], ids=["scripted", "loaded"])
def test_buffers_that_are_not_persistent_stay_out_of_the_state(impl, load):
    """The states of the eager and of the compiled network have the same keys, and fit."""
    net = with_a_transient_buffer(impl)
    module = impl.jit.script(net)
    if load:
        module = reloaded(impl, module)
    traced = impl.jit.trace_module(net, {"forward": inputs()})
    found = module.load_state_dict(net.state_dict())

    assert list(module.state_dict()) == list(traced.state_dict()) == list(net.state_dict())
    assert found.missing_keys == []
    assert [name for name, _ in module.named_buffers()] == [n for n, _ in net.named_buffers()]


@pytest.mark.parametrize("load", [False, True], ids=["scripted", "loaded"])
def test_containers_hold_the_compiled_children(impl, load):
    """A compiled list, dict or sequence of modules gives its compiled children, in order."""
    module = impl.jit.script(with_containers(impl))
    if load:
        module = reloaded(impl, module)
    items, named, steps = module._modules["items"], module.named, module.steps

    assert [len(items), len(named), len(steps)] == [2, 2, 2]
    assert [isinstance(part, torch.jit.ScriptModule) for part in (*items, *steps)] == [True] * 4
    assert list(items) == [items[0], items[-1]]
    assert list(items[1:]) == [items[1]]
    assert list(named) == ["a", "b"]
    assert "a" in named
    assert "c" not in named
    assert 3 not in named
    assert named["a"].original_name == "Linear"
    assert [name for name, _ in named.items()] == list(named.keys()) == ["a", "b"]
    assert list(named.values()) == [named["a"], named["b"]]
    assert [name for name in ("popitem", "get") if hasattr(named, name)] == []
    assert [name for name in ("keys", "values", "items") if hasattr(steps, name)] == []
    assert torch.equal(steps[:1](inputs()), steps[0](inputs()))


@pytest.mark.parametrize("kind", ["scripted", "loaded", "reconstructed"])
def test_a_child_in_several_places_is_one(impl, kind):
    """A module in three places is one compiled module, also after loading."""
    net = with_a_shared_child(impl)
    module = impl.jit.script(net)
    if kind == "loaded":
        module = reloaded(impl, module)
    if kind == "reconstructed":
        module._reconstruct(reloaded(impl, module)._c)

    assert torch.equal(module(inputs()), net(inputs()))
    assert module.first is module.second is module.deep[0]
    assert len(list(module.modules())) == len(list(net.modules()))
    assert module._c.getattr("first") == module._c.getattr("second")


def test_a_child_in_several_places_of_a_module_of_torch_is_one():
    """A wrapper is made for each compiled child of a module that torch has loaded, and one alone."""
    loaded = reloaded(TORCH, MODKIT.jit.script(with_a_shared_child(MODKIT)))
    module = MODKIT.jit.ScriptModule.from_torch(loaded)

    assert module.first is module.second is module.deep[0]


@pytest.mark.parametrize("load", [False, True], ids=["scripted", "loaded"])
def test_a_compiled_property_is_read_and_set(impl, load):
    """A property gives its value, and goes through its setter."""

    class Net(impl.nn.Module):
        def __init__(self):
            super().__init__()
            self.part = 1.5

        @property
        def whole(self) -> float:
            return self.part * 2

        @whole.setter
        def whole(self, value: float):
            self.part = value / 2

        def forward(self, x):
            return x * self.whole

    module = impl.jit.script(Net())
    if load:
        module = reloaded(impl, module)
    before = module.whole
    module.whole = 5.0

    assert before == 3.0
    assert (module.part, module.whole) == (2.5, 5.0)
    assert torch.equal(module(torch.ones(1)), torch.tensor([5.0]))


@pytest.mark.parametrize("kind", ["traced", "class-based"])
def test_backward_hooks_run(impl, kind):
    """A full backward hook runs on a traced and on a class-based module."""
    module = build(impl, kind)
    seen = []
    handle = module.register_full_backward_hook(
        lambda m, grad_input, grad_output: seen.append((grad_input[0].shape, grad_output[0].shape))
    )
    module(inputs().requires_grad_()).sum().backward()
    handle.remove()
    module(inputs()).sum().backward()

    assert seen == [((4, 3), (4, 2))]


def test_a_missing_extra_file_can_be_an_error(tmp_path):
    """With ``strict_extra_files`` the error names the missing file and those that are there."""
    files = {"labels.txt": "", "empty": "", "more.txt": ""}
    module = build(MODKIT, "scripted")
    buffer = io.BytesIO(module.save_to_buffer(_extra_files={"empty": ""}))
    flatbuffer = str(tmp_path / "net.ff")
    MODKIT.jit.save_jit_module_to_flatbuffer(module, flatbuffer)

    with pytest.raises(KeyError, match=r"no extra file 'a'; it has none"):
        MODKIT.jit.load(flatbuffer, _extra_files={"a": ""}, strict_extra_files=True)
    with pytest.raises(KeyError, match=r"no extra file 'labels\.txt', 'more\.txt'; it has 'empty'"):
        MODKIT.jit.load(buffer, _extra_files=files, strict_extra_files=True)
    assert files == {"labels.txt": "", "empty": "", "more.txt": ""}


def test_each_instance_compiles_what_its_constructor_defines(impl):
    """Methods that are defined in a constructor are those of that instance."""

    class Adds(impl.jit.ScriptModule):
        def __init__(self, number: int):
            super().__init__()
            self.define(f"def forward(self, x: Tensor) -> Tensor:\n    return x + {number}\n")

    results = [Adds(number)(torch.zeros(1)).item() for number in (1, 2, 3)]

    assert results == [1, 2, 3]


def test_a_frozen_module_has_the_children_that_change(impl):
    """A buffer that compiled code writes to is part of the state, although it is that of a child."""

    class Count(impl.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls += 1
            return x

    frozen = impl.jit.freeze(impl.jit.script(impl.nn.Sequential(Count()).eval()))
    frozen(inputs())

    assert dict(frozen.named_buffers()) == {"0.calls": 1}


@pytest.mark.parametrize("kind", ["traced", "class-based"])
def test_members_can_be_replaced(impl, kind):
    """A parameter or a buffer that is there can be registered anew."""
    module = build(impl, kind)
    gain = torch.nn.Parameter(torch.ones(2))
    module.register_parameter("gain", gain)
    module.register_buffer("shift", torch.zeros(2))
    eager = make_net(TORCH)
    eager.gain, eager.shift = gain, torch.zeros(2)

    assert module.gain is gain
    assert torch.equal(module.shift, torch.zeros(2))
    assert torch.equal(module(inputs()), eager(inputs()))


@for_each("kind", ["scripted", "loaded", "traced", "class-based", "frozen"])
@for_each(
    ("add", "message"),
    [
        (lambda m: m.register_buffer("more", torch.ones(1)), "new buffer .* add 'more'$"),
        (
            lambda m: m.register_parameter("more", torch.nn.Parameter(torch.ones(1))),
            "new parameter .* add 'more'$",
        ),
        (lambda m: setattr(m, "more", torch.nn.Parameter(torch.ones(1))), "parameter .* 'more'$"),
        (lambda m: setattr(m, "more", torch.nn.Buffer(torch.ones(1))), "new buffer .* 'more'$"),
        (
            lambda m: m.add_module("more", copy.deepcopy(m)),
            "new child .* add 'more': RecursiveScriptModule|Net",
        ),
        (lambda m: m.add_module("more", torch.nn.ReLU()), "new child .* 'more': ReLU"),
        (lambda m: setattr(m, "more", torch.nn.ReLU()), "new child .* 'more': ReLU"),
    ],
    ids=[
        "buffer",
        "parameter",
        "set parameter",
        "set buffer",
        "child",
        "child of Python",
        "set child",
    ],
)
def test_new_members_are_refused_by_name(kind, add, message):
    """The compiled type has no room for another tensor or child, and the error names it."""
    module = build(MODKIT, kind)

    with pytest.raises(RuntimeError, match=message):
        add(module)
    assert not hasattr(module, "more")


@for_each("kind", ["parameter", "buffer", "child"])
def test_the_error_of_a_deletion_names_the_member(kind):
    """Torch's error is followed by the name and the kind of what was to be deleted."""
    name, texts = {"parameter": "gain", "buffer": "shift", "child": "lin"}[kind], []
    for impl in (TORCH, MODKIT):
        with pytest.raises(RuntimeError) as caught:
            delattr(build(impl, "scripted"), name)
        texts.append(str(caught.value))

    assert texts[1] == f"{texts[0]}: '{name}' is a {kind} of its compiled type"


@for_each("copied", [copy.copy, copy.deepcopy])
def test_a_copy_keeps_buffers_out_of_its_state(copied):
    """A buffer that is not part of the state of a module is not part of that of its copies."""
    module = MODKIT.jit.script(with_a_transient_buffer(MODKIT))
    other = copied(module)

    assert list(other.state_dict()) == ["lin.weight", "lin.bias"]
    other.register_buffer("mask", other.mask)
    assert list(other.state_dict()) == ["mask", "lin.weight", "lin.bias"]
    assert list(module.state_dict()) == ["lin.weight", "lin.bias"]


def one_more(x):
    """Return a tensor plus one."""
    return x + 1


@for_each("copied", [copy.copy, copy.deepcopy])
def test_a_copy_compiles_what_the_module_compiles(copied):
    """A method that is defined later may call the functions that are attributes of the module."""

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.function = one_more

        def forward(self, x):
            return self.function(x)

    other = copied(MODKIT.jit.script(Net()))
    other.define("def twice(self, x):\n    return self.function(self.function(x))\n")

    assert other.twice(torch.ones(1)).item() == 3
