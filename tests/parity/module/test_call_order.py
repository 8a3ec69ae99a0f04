import torch

from tests.capabilities import MODULES_CAN_REPEAT
from tests.cases import for_each
from tests.helpers import same
from tests.parity.module.contents import run


# The methods of Module that other methods call, so that an override of them is noticed.
OVERRIDABLE = (
    "add_module",
    "apply",
    "children",
    "extra_repr",
    "get_submodule",
    "modules",
    "named_buffers",
    "named_children",
    "named_modules",
    "named_parameters",
    "parameters",
    "register_buffer",
    "register_module",
    "register_parameter",
    "state_dict",
    "train",
    "_apply",
    "_get_name",
    "_load_from_state_dict",
    "_named_members",
    "_register_load_state_dict_pre_hook",
    "_save_to_state_dict",
    "__repr__",
    "__setattr__",
)

OPERATIONS = (
    "list(m.parameters())",
    "list(m.parameters(recurse=False))",
    "list(m.named_parameters())",
    "list(m.named_parameters('p', False, False))",
    "list(m.named_parameters(remove_duplicate=False))",
    "list(m.buffers())",
    "list(m.named_buffers())",
    "list(m.named_buffers('p', True, False))",
    "list(m.children())",
    "list(m.named_children())",
    "list(m.modules())",
    *(["list(m.modules(False))"] if MODULES_CAN_REPEAT else []),
    "list(m.named_modules())",
    "list(m.named_modules(set(), 'p', False))",
    "list(m._named_members(lambda module: module._parameters.items()))",
    "m.apply(lambda module: None)",
    "m.train()",
    "m.train(False)",
    "m.train(mode=False)",
    "m.eval()",
    "m.requires_grad_(False)",
    "m.zero_grad()",
    "m.zero_grad(set_to_none=False)",
    "m.float()",
    "m.double()",
    "m.half()",
    "m.bfloat16()",
    "m.cpu()",
    "m.type(torch.float64)",
    "m.to('cpu')",
    "m.to(torch.float64)",
    "m.to(device='cpu', dtype=torch.float64, non_blocking=True)",
    "m.to_empty(device='cpu')",
    "m.to_empty(device='meta', recurse=False)",
    "m.share_memory()",
    "m._apply(lambda t: t)",
    "m._apply(lambda t: t, False)",
    "m._apply(lambda t: t, recurse=True)",
    "m.state_dict()",
    "m.state_dict(prefix='p.', keep_vars=True)",
    "m.state_dict(destination={})",
    "m.load_state_dict(m.state_dict())",
    "m.load_state_dict({}, strict=False)",
    "m.load_state_dict(m.state_dict(), assign=True)",
    "repr(m)",
    "str(m)",
    "dir(m)",
    "setattr(m, 'x', Parameter(ones(1)))",
    "setattr(m, 'x', Buffer(ones(1)))",
    "setattr(m, 'x', Identity())",
    "setattr(m, 'x', 3)",
    "setattr(m, 'mean', ones(3))",
    "setattr(m, 'weight', None)",
    "m.register_module('x', Identity())",
    "m.register_load_state_dict_pre_hook(print)",
    "m.get_submodule('child.inner')",
    "m.get_parameter('child.inner.weight')",
    "m.get_buffer('child.mean')",
    "m.set_submodule('child.x', Identity())",
    "m.set_submodule('x', Identity())",
    "m(ones(3))",
)


def describe(value, seen):
    """Turn an argument into something that compares across the two implementations."""
    if isinstance(value, torch.nn.Module):
        return ("module", seen.get(id(value), type(value).__name__))
    if isinstance(value, torch.Tensor):
        return ("tensor", tuple(value.shape))
    if isinstance(value, dict):
        return (type(value).__name__, [*value], [*getattr(value, "_metadata", {})])
    if isinstance(value, set):
        return ("set", len(value))
    if isinstance(value, list):
        return ("list", len(value))
    return "callable" if callable(value) else repr(value)


def build(impl, method, level):
    """Build three levels; the method is logged in the class, or on the instance, of one level."""
    log, seen = [], {}

    class Plain(impl.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(2))
            self.register_buffer("mean", torch.ones(3))

        def forward(self, value):
            return self.child(value) if "child" in self._modules else value

    def logged(self, *args, **keywords):
        described = {key: describe(value, seen) for key, value in keywords.items()}
        log.append((seen.get(id(self)), [describe(arg, seen) for arg in args], described))
        return getattr(super(Overriding, self), method)(*args, **keywords)

    Overriding = type("Plain", (Plain,), {method: logged})

    on_instance = level.endswith("instance")
    root, child, inner, sibling = (Plain() for _ in range(4))
    root.child, child.inner, root.sibling, root.again = child, inner, sibling, sibling
    levels = {"root": [root], "child": [child], "all": [root, child, inner, sibling]}
    for module, name in ((root, "root"), (child, "child"), (inner, "inner"), (sibling, "sib")):
        seen[id(module)] = name
    for module in levels[level.split()[0]]:
        if on_instance:
            vars(module)[method] = lambda *args, module=module, **keywords: instance_logged(
                module, *args, **keywords
            )
        else:
            module.__class__ = Overriding

    def instance_logged(module, *args, **keywords):
        described = {key: describe(value, seen) for key, value in keywords.items()}
        log.append((seen[id(module)], [describe(arg, seen) for arg in args], described))
        return getattr(type(module), method)(module, *args, **keywords)

    return root, log


@for_each("level", ["all", "root", "child", "child instance"])
@for_each("method", OVERRIDABLE)
def test_overrides_are_called_as_torch_calls_them(method, level):
    """For each operation an override is called as often, in the same order, in the same form.

    The form counts: an override may name its arguments differently, or know fewer of them.
    """

    def scenario(impl):
        calls = {}
        for operation in OPERATIONS:
            # Torch tells the override of a load that is not strict that it is; a fix has its own
            # test of what modkit tells it.
            if method == "_load_from_state_dict" and "strict=False" in operation:
                continue
            module, log = build(impl, method, level)
            run(operation, module)
            calls[operation] = list(log)
        return calls

    assert same(scenario)[0] == "returned"


def test_overrides_that_return_less_are_respected():
    """Modules that an override omits from a walk are omitted from every operation built on it."""

    def scenario(impl):
        found = []
        for method in ("named_modules", "named_children", "children", "named_parameters"):
            for operation in OPERATIONS[: OPERATIONS.index("repr(m)")]:
                module, _ = build(impl, "zero_grad", "all")
                empty = type("Plain", (type(module.child),), {method: lambda *_, **__: iter(())})
                module.child.__class__ = empty
                result = run(operation, module)
                state = [(key, str(value.dtype)) for key, value in module.state_dict().items()]
                found.append((method, operation, type(result).__name__, state))
                found.append([each.training for each in (module, module.child, module.sibling)])
        return found

    assert same(scenario)[0] == "returned"


def test_an_override_that_returns_a_list():
    """Overrides of the walks may return any iterable; what is built on them stays an iterator."""

    def scenario(impl):
        found = []
        for method in ("named_modules", "named_children", "children", "_named_members"):
            for operation in ("parameters", "named_parameters", "buffers", "modules", "children"):
                module, _ = build(impl, "zero_grad", "all")
                base = type(module)

                def listed(self, *args, base=base, method=method, **keywords):
                    return list(getattr(super(base, self), method)(*args, **keywords))

                if operation == method:
                    continue
                module.__class__ = type("Plain", (base,), {method: listed})
                walk = getattr(module, operation)()
                found.append((method, operation, type(walk).__name__, len(list(walk))))
        return found

    assert same(scenario)[0] == "returned"
