"""Printing a module with what it contains."""

import torch

from modkit._upstream import indent_lines
from modkit.nn._tree import is_standard, refuse_cycle


def _assemble(module: torch.nn.Module, extra: str, children: list[str]) -> str:
    extra_lines = extra.split("\n") if extra else []
    name = module._get_name()
    if len(extra_lines) == 1 and not children:
        return f"{name}({extra_lines[0]})"
    lines = extra_lines + children
    body = "\n  " + "\n  ".join(lines) + "\n" if lines else ""
    return f"{name}({body})"


def render(module: torch.nn.Module) -> str:
    """Return the repr: the class name, ``extra_repr``, then each child indented by two spaces."""
    active = {id(module)}
    # One entry per open module: itself, its extra_repr, its children still to come, the finished
    # children's lines, and the name under which the open child will be listed.
    stack = [(module, module.extra_repr(), iter(module._modules.items()), list[str]())]
    names: list[str] = []
    while True:
        parent, extra, children, done = stack[-1]
        for name, child in children:
            if child is None or not is_standard(child, "__repr__"):
                done.append(f"({name}): " + indent_lines(repr(child), 2))
                continue
            if id(child) in active:
                refuse_cycle(child)
            active.add(id(child))
            names.append(name)
            stack.append((child, child.extra_repr(), iter(child._modules.items()), []))
            break
        else:
            stack.pop()
            active.discard(id(parent))
            text = _assemble(parent, extra, done)
            if not stack:
                return text
            stack[-1][3].append(f"({names.pop()}): " + indent_lines(text, 2))


def directory(module: torch.nn.Module) -> list[str]:
    """Return the sorted attribute names, members included, that could be written in Python."""
    names = [
        *dir(type(module)),
        *module.__dict__,
        *module._parameters,
        *module._modules,
        *module._buffers,
    ]
    return sorted(name for name in names if not name[0].isdigit())
