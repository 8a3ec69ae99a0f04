"""What a ScriptModule holds, read from and written to C++ under the names of ``Module``."""

from collections.abc import ItemsView, Iterator, KeysView, MutableMapping, ValuesView
from typing import Any, NoReturn

import torch
from typing_extensions import Self


class Tensors(MutableMapping[str, Any]):
    """The parameters or the buffers of a C++ module; a name whose value is None is not there.

    What is read is always what C++ has at that moment, since compiled code may replace a tensor.
    """

    __slots__ = ("_cpp", "_kind")

    def __init__(self, cpp: Any, kind: str) -> None:
        self._cpp = cpp
        self._kind = kind

    def keys(self) -> KeysView[str]:
        """Return the names."""
        return dict[str, Any](self._cpp.items()).keys()

    def values(self) -> ValuesView[Any]:
        """Return the tensors."""
        return dict[str, Any](self._cpp.items()).values()

    def items(self) -> ItemsView[str, Any]:
        """Return the pairs, which stay what they are while tensors are being replaced."""
        return dict[str, Any](self._cpp.items()).items()

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __len__(self) -> int:
        return len(self._cpp.items())

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and bool(self._cpp.contains(name))

    def __getitem__(self, name: str) -> Any:
        if name not in self:
            raise KeyError(name)
        return self._cpp.getattr(name)

    def __setitem__(self, name: str, value: Any) -> None:
        if name not in self:
            raise RuntimeError(
                f"Can't add a new {self._kind} after ScriptModule construction. "
                f"Tried to add '{name}'"
            )
        self._cpp.setattr(name, value)

    def __delitem__(self, name: str) -> NoReturn:
        raise RuntimeError(
            f"cannot delete methods or parameters of a script module: '{name}' is a {self._kind} "
            "of its compiled type"
        )


class Children(dict[str, Any]):
    """The children of a C++ module by name, each as the one object in Python that stands for it."""

    __slots__ = ("_cpp",)

    def __init__(self, cpp: Any, children: dict[str, Any]) -> None:
        super().__init__(children)
        self._cpp = cpp

    def note(self, name: str, child: Any) -> None:
        """Enter a child that C++ has already."""
        super().__setitem__(name, child)

    def __setitem__(self, name: str, value: Any) -> None:
        if name not in self and not self._cpp.contains(name):
            raise RuntimeError(
                "Can't add a new child after ScriptModule construction. "
                f"Tried to add '{name}': {value}"
            )
        if not isinstance(value, torch.jit.ScriptModule):
            raise RuntimeError(  # noqa: TRY004 - torch's type
                "Cannot re-assign modules in a ScriptModule with non-scripted "
                f"module, tried to replace existing module '{name}': {value}"
            )
        self._cpp.setattr(name, value)
        super().__setitem__(name, value)

    def __delitem__(self, name: str) -> NoReturn:
        raise RuntimeError(
            f"cannot delete methods or parameters of a script module: '{name}' is a child of its "
            "compiled type"
        )

    def pop(self, name: str, *_: Any) -> NoReturn:
        """Refuse, as for any other way of deleting."""
        del self[name]
        raise AssertionError

    def popitem(self) -> NoReturn:
        """Refuse, as for any other way of deleting."""
        self.pop(next(reversed(self), ""))

    def clear(self) -> None:
        """Refuse, unless there is nothing to delete."""
        for name in self:
            self.pop(name)

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Replace several, each through its check."""
        for name, value in dict[str, Any](*args, **kwargs).items():
            self[name] = value

    def __ior__(self, other: Any) -> Self:  # type: ignore[override,misc]
        self.update(other)
        return self

    def setdefault(self, name: str, default: Any = None) -> Any:
        """Return the child; there cannot be a new one."""
        if name not in self:
            self[name] = default
        return self[name]
