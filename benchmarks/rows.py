"""One row for each operation that has a budget, and for each that is slower than in torch."""

import copy
import importlib
import pickle
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache, partial
from types import ModuleType
from typing import Any, Final

import torch

import modkit.nn
from benchmarks.measure import NOT_SLOWER, Arms, Code, Row
from modkit import migrations


Names = dict[str, Any]
Make = Callable[[ModuleType], Names]
NAMESPACES: Final = {"torch": torch.nn, "modkit": modkit.nn}


def both(
    name: str,
    statement: str,
    make: Make,
    budget: float = NOT_SLOWER,
    limit: str = "",
    cold: float | bool | None = False,
) -> Row:
    """Compare a statement on torch and on modkit; ``limit`` is the same written by hand."""

    def arms(_: ExitStack) -> Arms:
        made = {library: Code(statement, make(nn)) for library, nn in NAMESPACES.items()}
        return {**made, **({"limit": Code(limit, make(torch.nn))} if limit else {})}

    return Row(name, budget, arms, cold)


def against(
    name: str, budget: float, base: str, statement: str, make: Any, cold: Any = False
) -> Row:
    """Compare a statement with another one that uses the same names."""

    def arms(_: ExitStack) -> Arms:
        names = make()
        return {"base": Code(base, names), "modkit": Code(statement, names)}

    return Row(name, budget, arms, cold)


def sibling(nn: ModuleType, dotted: str) -> Any:
    """Import a module of the same library."""
    return importlib.import_module(f"{nn.__name__.partition('.')[0]}.{dotted}")


def module(nn: Any, forward: Callable[..., Any], **members: Any) -> Any:
    """Define a user's class with this forward, and make a module of it with these members."""
    made = type("Net", (nn.Module,), {"forward": forward})()
    for name, value in members.items():
        setattr(made, name, value)
    return made


def user_model(nn: Any, body: object) -> Any:
    """Put layers below a user's class: of all modules, only that one is modkit's."""
    return module(nn, lambda m, x: x, body=body)


def network(nn: Any) -> Names:
    """Make a nested network of 497 modules that hold 770 tensors."""

    def block() -> object:
        return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU())

    model = user_model(nn, nn.Sequential(*(nn.Sequential(block(), block()) for _ in range(55))))
    state = model.state_dict()
    dicts = [vars(module) for module in model.modules()]
    copies = [tensor.clone() for tensor in state.values()]
    return {"m": model, "state": state, "dicts": dicts, "copies": copies, "torch": torch}


def two_layers(nn: Any) -> Names:
    """Make a model that is so small that the fixed cost of an operation counts."""
    model = module(nn, lambda m, x: x, first=nn.Linear(2, 2), second=nn.Linear(2, 2))
    return {"m": model, "state": model.state_dict()}


def siblings(nn: Any, count: int = 3000) -> Names:
    """Make a flat list of layers, as in a mixture of experts or an ensemble."""
    model = user_model(nn, nn.ModuleList(nn.Linear(1, 1) for _ in range(count)))
    return {"m": model, "state": model.state_dict()}


def norms(nn: Any, layers: Any) -> Names:
    """Load a dict without versions, as a safetensors file is, into layers that migrate."""
    model = user_model(nn, layers)
    return {"m": model, "state": dict(model.state_dict())}


def nested_norms(nn: Any) -> Names:
    """Make 512 BatchNorms, eight in each of eight times eight lists."""

    def layers(levels: int) -> Any:
        if levels == 0:
            return nn.BatchNorm1d(1)
        return nn.ModuleList(layers(levels - 1) for _ in range(8))

    return norms(nn, layers(3))


def sibling_norms(nn: Any) -> Names:
    """Make a flat list of 1,600 BatchNorms."""
    return norms(nn, nn.ModuleList(nn.BatchNorm1d(1) for _ in range(1600)))


@cache
def block_class(nn: Any) -> Any:
    """Define a user's module with two layers, at module level, so that it can be pickled."""

    class Block(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
            self.blocks = nn.ModuleList()
            self.scale = nn.Parameter(torch.ones(8))
            self.register_buffer("offset", torch.zeros(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            out: torch.Tensor = self.second(self.first(x).relu()) * self.scale + self.offset
            return out

    Block.__name__ = Block.__qualname__ = f"Block_{nn.__name__.partition('.')[0]}"
    globals()[Block.__name__] = Block
    return Block


def tree(nn: Any) -> Names:
    """Make twenty blocks below another block, and something of each kind to register in it."""
    block = block_class(nn)
    model = block()
    model.blocks.extend(block() for _ in range(20))
    new = {"parameter": nn.Parameter(torch.ones(8)), "tensor": torch.ones(8), "child": nn.ReLU()}
    modules = {"copy": copy, "pickle": pickle, "torch": torch, "Module": nn.Module, "Block": block}
    return {"m": model, "x": torch.ones(1, 8), "data": pickle.dumps(model), **new, **modules}


def chain(nn: Any) -> Names:
    """Make 120 modules of users, one after the other, each with a layer."""

    class Link(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.layer(x).relu() + x
            return out

    links = nn.Sequential(*(Link() for _ in range(119)))
    model = module(nn, lambda m, x: m.links(x), links=links)
    return {"m": model, "inputs": (torch.ones(1, 8),), "torch": torch}


def compiled(nn: ModuleType) -> Names:
    """Make a compiled network; a call costs mostly dynamo's guards."""
    names = tree(nn)
    names["m"] = torch.compile(names["m"], backend="eager", fullgraph=True)
    names["m"](names["x"])
    return names


def empty(nn: Any, error: type[Exception] | None = None) -> Names:
    """Make a module whose forward does nothing, or raises."""

    def fail(m: object, x: object) -> None:
        raise error or AssertionError

    made = module(nn, (lambda m, x: x) if error is None else fail)
    return {"m": made, "x": torch.ones(1, requires_grad=True), "state": {}}


def hooked(register: str, count: int = 1, error: Any = None, **options: bool) -> Make:
    """Make empty modules with that many hooks that do nothing."""

    def make(nn: ModuleType) -> Names:
        names = empty(nn, error)
        for _ in range(count):
            getattr(names["m"], register)(lambda *args, **kwargs: None, **options)
        return names

    return make


def scripted(nn: ModuleType, *, method: bool = False) -> Names:
    """Compile a module whose forward does nothing, or define a class with a script method."""
    jit = sibling(nn, "jit")

    class Empty(jit.ScriptModule):  # type: ignore[misc, name-defined]
        @jit.script_method  # type: ignore[untyped-decorator]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    module = Empty() if method else jit.script(nn.Identity())
    for _ in range(5):  # The executor optimizes in the first calls.
        module(torch.zeros(1))
    return {"m": module, "x": torch.zeros(1)}


def scripted_tree(nn: Any) -> Names:
    """Compile a small tree."""
    pairs = (nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(4))
    return {"m": sibling(nn, "jit").script(nn.Sequential(*pairs))}


def own_bytes(kind: type[object], number: int = 1) -> int:
    """Return the size of an object of the class, its ``__dict__``, and what only it refers to."""
    # The layout of a ``__dict__`` depends on earlier objects of the class.
    *_, twin, subject = (kind() for _ in range(10))
    shared = {id(value) for value in vars(twin).values()}
    own = {id(value): value for value in vars(subject).values() if id(value) not in shared}
    return number * sum(map(sys.getsizeof, [subject, vars(subject), *own.values()]))


def bytes_of_a_module(_: ExitStack) -> Arms:
    """Measure an empty module of a class that adds nothing and has no history."""
    kinds = {library: type("Empty", (nn.Module,), {}) for library, nn in NAMESPACES.items()}
    return {library: partial(own_bytes, kind) for library, kind in kinds.items()}


def imports(_: ExitStack) -> Arms:
    """Time the imports of torch and of modkit after it, in a new process each time."""
    code = (
        "import time; t = time.thread_time(); import torch; t1 = time.thread_time(); "
        "import modkit, modkit.nn; print(t1 - t, time.thread_time() - t1)"
    )

    def run(which: int, number: int) -> float:
        command = [sys.executable, "-c", code]
        outputs = [subprocess.check_output(command) for _ in range(number)]  # noqa: S603 - our code
        return sum(float(output.split()[which]) for output in outputs)

    return {"torch": partial(run, 0), "modkit": partial(run, 1)}


def sizes_of_siblings(_: ExitStack) -> Arms:
    """Load twice as many siblings."""
    return {f"{n}": Code(LOAD, siblings(modkit.nn, n)) for n in (3000, 6000)}


def declaring(nn: Any, *, declared: bool) -> Names:
    """Make a model of 770 tensors, 128 of whose modules may declare migrations."""

    def parameters(owner: Any, names: str) -> None:
        for name in names:
            owner.register_parameter(name, nn.Parameter(torch.zeros(2)))

    class Leaf(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            parameters(self, "ab")

    class Attention(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            parameters(self, "abc")

    class Block(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            parameters(self, "abc")
            self.attention = Attention()
            self.leaves = nn.ModuleList(Leaf() for _ in range(3))

    if declared:
        for cls in (Attention, Block):
            migrations.declare({2: [migrations.rename("old.**", "new.**")]})(cls)
    model = user_model(nn, nn.ModuleList(Block() for _ in range(64)))
    parameters(model, "ab")
    return {"m": model, "state": model.state_dict()}


def declaring_or_not(nn: Any, _: ExitStack) -> Arms:
    """Load a state dict with nothing to migrate, without and with declarations."""
    return {f"{n}": Code(LOAD, declaring(nn, declared=n)) for n in (False, True)}


LOAD: Final = "m.load_state_dict(state)"
ASSIGN: Final = "m.load_state_dict(state, assign=True)"
MODE: Final = "for d in dicts: d['training'] = True"
COPY: Final = "torch._foreach_copy_([*state.values()], copies)"
HOOK: Final = "register_forward_hook"
PRE_HOOK: Final = "register_forward_pre_hook"
LOAD_HOOK: Final = "register_load_state_dict_post_hook"
FAIL: Final = "try: m(x)\nexcept ValueError: pass"
CLASS: Final = "class Net(Module): pass"
TRACE: Final = "torch.compiler.reset(); torch.compile(m, backend='eager', fullgraph=True)(*inputs)"


TIMES: Final = [
    both("m(x), empty forward", "m(x)", empty, limit="m.forward(x)", cold=None),
    both("m(x), one forward hook", "m(x)", hooked(HOOK), cold=None),
    both("m.flag = 1", "m.flag = 1", empty, limit="m.__dict__['flag'] = 1"),
    both("Module()", "Module()", tree, cold=None),
    both("parameters()", "for _ in m.parameters(): pass", network, cold=None),
    both("modules()", "for _ in m.modules(): pass", network, cold=None),
    both("named_parameters()", "for _ in m.named_parameters(): pass", network, cold=None),
    both("state_dict()", "m.state_dict()", network, cold=None),
    both("load_state_dict(), 770 tensors", LOAD, network, 0.21, COPY, cold=None),
    both("load_state_dict(), 3,000 siblings", LOAD, siblings, 0.03),
    both("load_state_dict(assign=True), 770 tensors", ASSIGN, network, 0.30),
    both("load_state_dict() of a plain dict, 512 nested BatchNorms", LOAD, nested_norms, 1.10),
    both("load_state_dict() of a plain dict, 1,600 BatchNorms", LOAD, sibling_norms, 0.40),
    both("train()", "m.train()", network, limit=MODE, cold=None),
    both("float(), nothing to do", "m.float()", network, cold=None),
    both("to(dtype), nothing to do", "m.to(torch.float32)", network, cold=None),
    both("zero_grad()", "m.zero_grad()", network, cold=None),
    both("parameters(), two layers", "for _ in m.parameters(): pass", two_layers),
    both("state_dict(), two layers", "m.state_dict()", two_layers),
    both("load_state_dict(), two layers", LOAD, two_layers),
    both("train(), two layers", "m.train()", two_layers),
    both("zero_grad(), two layers", "m.zero_grad()", two_layers),
    both("register_parameter()", "m.register_parameter('scale', parameter)", tree),
    both("register_buffer()", "m.register_buffer('offset', tensor)", tree),
    both("add_module()", "m.add_module('first', child)", tree),
    both("m.scale = Parameter", "m.scale = parameter", tree),
    both("m.scale = None", "m.scale = None", tree),
    both("m.offset = tensor", "m.offset = tensor", tree),
    both("m.first = Module", "m.first = child", tree),
    both("m.new = Parameter; del m.new", "m.new = parameter; del m.new", tree),
    both("user block with two layers()", "Block()", tree),
    # Python fills the slots of a class from all its bases, of which a class of modkit has one more.
    both("class definition", CLASS, tree, 1.3, "class Net(Block): pass"),
    both("get_submodule()", "m.get_submodule('blocks.7.first')", tree),
    both("copy.copy()", "copy.copy(m)", tree),
    both("copy.deepcopy(), 84 modules", "copy.deepcopy(m)", tree),
    both("pickle.dumps(), 84 modules", "pickle.dumps(m)", tree),
    both("pickle.loads(), 84 modules", "pickle.loads(data)", tree),
    both("repr(), 84 modules", "repr(m)", tree),
    both("apply(), 84 modules", "m.apply(id)", tree),
    both("forward of a tree, 84 modules", "m(x)", tree, cold=None),
    both("m(x), forward pre-hook", "m(x)", hooked(PRE_HOOK)),
    both("m(x), pre-hook with kwargs", "m(x)", hooked(PRE_HOOK, with_kwargs=True)),
    both("m(x), hook with kwargs", "m(x)", hooked(HOOK, with_kwargs=True)),
    both("m(x), ten forward hooks", "m(x)", hooked(HOOK, 10)),
    both("m(x), full backward hook", "m(x)", hooked("register_full_backward_hook")),
    both("m(x), full backward pre-hook", "m(x)", hooked("register_full_backward_pre_hook")),
    both("m(x) that raises, always_call", FAIL, hooked(HOOK, error=ValueError, always_call=True)),
    both("load_state_dict() of one module, hook", LOAD, hooked(LOAD_HOOK)),
    both("torch.fx.symbolic_trace()", "torch.fx.symbolic_trace(m)", tree),
    both("torch.export.export()", "torch.export.export(m, (x,))", tree),
    both("dynamo trace, 120 modules of users", TRACE, chain, 1.02),
    both("call of a compiled network", "m(x)", compiled, 1.02),
    both("m(x), scripted, empty forward", "m(x)", scripted),
    both("m(x), class with a script method", "m(x)", partial(scripted, method=True), 0.80),
    both("state_dict(), scripted tree", "m.state_dict()", scripted_tree),
    both("parameters(), scripted tree", "for _ in m.parameters(): pass", scripted_tree),
    both("children(), scripted tree", "for _ in m.children(): pass", scripted_tree),
]
OPERATIONS: Final = [
    *TIMES,
    Row("load_state_dict(), 6,000 / 3,000 siblings, both modkit", 2.4, sizes_of_siblings),
    Row(
        "load_state_dict(), 128 declared classes / none", 1.02, partial(declaring_or_not, modkit.nn)
    ),
    Row(
        "torch's load_state_dict(), 128 declared classes / none",
        1.02,
        partial(declaring_or_not, torch.nn),
    ),
    Row("import modkit / import torch, before it", 0.05, imports),
    Row("bytes of an empty Module()", 1.05, bytes_of_a_module, unit="B"),
]
