"""The class ``ScriptModule``: a module whose state and methods are those of a C++ module.

Every method is a signature, a docstring and one call, to a mechanism beside this file. What is not
defined here is that of ``modkit.nn.Module``, which finds the members through views of C++.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, cast

import torch
from typing_extensions import Self

from modkit.jit import _archive_io, _copies, _definitions, _members, _wrap
from modkit.jit._class_based import ScriptMeta
from modkit.jit._upstream import ConstMap
from modkit.nn.module import Module


class _Forward:
    """Finds the compiled ``forward``; from then on the instance has it in its own dict.

    Without this, the one of ``Module`` would be found, which only raises. It gives way to what the
    instance has, so that a call costs no more than to look there.
    """

    def __get__(self, module: Any, owner: type) -> Any:
        if module is None:
            raise AttributeError("forward")
        return module.__getattr__("forward")


# Where a property of these names finds nothing, the reason is that nothing is compiled.
_OF_COMPILED: Final = frozenset(
    ("code", "code_with_constants", "graph", "inlined_graph", "original_name", "forward")
)


class ScriptModule(Module, torch.jit.ScriptModule, metaclass=ScriptMeta):
    """A module of TorchScript: a wrapper around the C++ ``torch::jit::Module``.

    It comes from ``modkit.jit.script``, ``trace``, ``load`` or ``freeze``, or is an instance of a
    class that is derived from this one and has methods marked with ``script_method``; such an
    instance is compiled when its constructor has returned. Methods, attributes, parameters,
    buffers, constants and children are read and set as on any module, and everything that takes a
    ScriptModule of torch takes this one.

    Example:
        >>> import torch
        >>> import modkit.nn as nn
        >>> from modkit import jit
        >>> module = jit.script(nn.Linear(4, 2))
        >>> isinstance(module, jit.ScriptModule), isinstance(module, torch.jit.ScriptModule)
        (True, True)
        >>> module(torch.ones(3, 4)).shape
        torch.Size([3, 2])

    Differs from torch: what is listed in ``docs/parity.md``.
    """

    # Keeps torch's metaclass from compiling: ours does.
    _disable_script_meta = True

    forward: Callable[..., Any] = _Forward()  # type: ignore[assignment]

    @classmethod
    def from_torch(cls, module: torch.jit.ScriptModule) -> "ScriptModule":
        """Return what stands for the same C++ module as a ScriptModule of torch.

        Both see what the other does. Parameters of C++ that are no ``Parameter`` become one.

        Raises:
            TypeError: ``module`` is no ScriptModule.

        Example:
            >>> import torch, warnings
            >>> with warnings.catch_warnings():
            ...     warnings.simplefilter("ignore")
            ...     plain = torch.jit.script(torch.nn.Linear(4, 2))
            >>> jit.ScriptModule.from_torch(plain).weight is plain.weight
            True

        Differs from torch: there is nothing like it.
        """
        if isinstance(module, ScriptModule):
            same: ScriptModule = module
            return same
        if not isinstance(cast("object", module), torch.jit.ScriptModule):
            raise TypeError(
                f"ScriptModule.from_torch takes a torch.jit.ScriptModule, not a "
                f"{torch.typename(module)}; modkit.jit.script and trace compile other modules"
            )
        wrapped: ScriptModule = _wrap.wrap_torch(ScriptModule, module)
        _wrap.make_parameters(wrapped)
        return wrapped

    # What was compiled.

    @property
    def code(self) -> str:
        """The code of ``forward``, as Python that TorchScript would compile again."""
        return cast("str", _definitions.forward_of(self).code)

    @property
    def code_with_constants(self) -> tuple[str, ConstMap]:
        """The code of ``forward``, and the constants that it names ``CONSTANTS.c0`` and so on."""
        code, constants = _definitions.forward_of(self).code_with_constants
        return code, ConstMap(constants)

    @property
    def graph(self) -> Any:
        """The graph of ``forward``; ``str`` of it shows all nodes."""
        return _definitions.forward_of(self).graph

    @property
    def inlined_graph(self) -> Any:
        """The graph of ``forward`` with the graphs of all functions and methods put in."""
        return _definitions.forward_of(self).inlined_graph

    @property
    def original_name(self) -> str:
        """The name of the class that was compiled."""
        return str(_members.compiled(self)._type().name())

    def graph_for(self, *args: Any, **kwargs: Any) -> Any:
        """Return the graph that was specialized for such arguments, after a call with them."""
        return self.forward.graph_for(self, *args, **kwargs)  # type: ignore[attr-defined]

    def get_debug_state(self) -> Any:
        """Return the state of the executor of ``forward``, which there is after a call."""
        return _members.compiled(self).get_debug_state()

    def define(self, src: str) -> None:
        """Compile a method from source; names in it are looked up where this is called.

        Raises:
            RuntimeError: the source does not compile, or the module has such a method already.
        """
        _definitions.define(self, src, frames_up=1)

    # Attributes.

    def __getattr__(self, name: str) -> Any:
        if "_c" in self.__dict__:
            return _members.find(self, name)
        if name in _OF_COMPILED:
            _members.compiled(self)
        return torch.nn.Module.__getattr__(cast("torch.nn.Module", self), name)

    def __setattr__(self, name: str, value: Any) -> None:
        if "_c" in self.__dict__:
            _members.assign(self, name, value)
        else:
            super().__setattr__(name, _definitions.without_type(self, name, value))

    def register_parameter(self, name: str, param: torch.nn.Parameter | None) -> None:
        """Replace the parameter ``name``; a compiled module cannot have further ones.

        Raises:
            RuntimeError: there is no such parameter.
            KeyError: ``name`` is an attribute that is no parameter.
        """
        super().register_parameter(name, param)

    def _get_name(self) -> str:
        return str(self.__dict__.get(_members.TRACED) or type(self).__name__)

    def extra_repr(self) -> str:
        """Return the name of the class that was compiled, where the class itself does not say it."""
        return "" if _definitions.is_class_based(self) else f"original_name={self.original_name}"

    def __dir__(self) -> list[str]:
        return _definitions.names_of(self, cast("Any", super()).__dir__())

    # Saving and copying.

    def save(self, f: Any, _extra_files: Mapping[str, str | bytes] | None = None) -> None:
        """Write the archive that ``torch.jit.load`` reads, in Python and in C++.

        Args:
            f: A path, which is written atomically, or a file that is open for writing.
            _extra_files: Further files for the archive: name to content.
        """
        _archive_io.save(self, f, _extra_files)

    def save_to_buffer(self, _extra_files: Mapping[str, str | bytes] | None = None) -> bytes:
        """Return what ``save`` would write."""
        return _archive_io.to_bytes(self, _extra_files)

    def __copy__(self) -> Self:
        return cast("Self", _copies.shallow(self))

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return cast("Self", _copies.deep(self, memo))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _copies.reduce(self)

    def _reconstruct(self, cpp_module: Any) -> None:
        """Stand for another C++ module from now on; quantization does this in place."""
        _wrap.rewrap(ScriptModule, self, cpp_module)

    def _replicate_for_data_parallel(self) -> Any:
        cpp = _members.compiled(self)._replicate_for_data_parallel()
        replica = _wrap.blank(type(self))
        _members.bind(replica, cpp, {}, self._concrete_type)
        return replica

    # Containers, and special methods that were compiled: Python looks for them in the class.

    def __len__(self) -> int:
        return len(self._modules) if _members.kind(self) else _definitions.special(self, "__len__")

    def __iter__(self) -> Iterator[Any]:
        kind = _members.kind(self)
        if kind is None:
            return cast("Iterator[Any]", _definitions.special(self, "__iter__"))
        return iter(self._modules if kind == "mapping" else self._modules.values())

    def __getitem__(self, index: Any) -> Any:
        if _members.kind(self):
            return _members.item(self, index)
        return _definitions.special(self, "__getitem__", index)

    def __contains__(self, key: Any) -> bool:
        kind = _members.kind(self)
        if kind is None:
            return bool(_definitions.special(self, "__contains__", key))
        if kind == "mapping":
            return key in self._modules
        return any(key is child for child in self._modules.values())

    def __bool__(self) -> bool:
        cpp = self.__dict__.get("_c")
        if cpp is not None and cpp._has_method("__bool__"):
            return bool(cpp._get_method("__bool__")())
        return True
