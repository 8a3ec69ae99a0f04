"""The class ``ScriptModule``: a module whose state and methods are those of a C++ module.

``code``, ``graph`` and others are inherited from ``torch.jit.ScriptModule``; the rest from
``modkit.nn.Module``, which finds parameters, buffers and children through views of C++.
"""

# Where torch's classes of wrappers have a method, these may have a property.
# pyright: reportIncompatibleMethodOverride=false

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from typing_extensions import Self

from modkit._messages import add_note
from modkit._upstream import FunctionT
from modkit.jit import _archives, _copies
from modkit.jit._attributes import BOOKKEEPING, DEFINED, assign, bind, find, item, kind
from modkit.jit._from_torch import (
    WRAPPERS,
    blank,
    make_parameters,
    rewrap,
    wrap_children,
    wrap_torch,
)
from modkit.jit._upstream import (
    ENABLED,
    MethodStub,
    ScriptMethod,
    TorchRecursiveScriptModule,
    TorchScriptMeta,
    TorchTopLevelTracedModule,
    TorchTracedModule,
    create_script_module,
    give_notice,
    method_definition,
    methods_to_compile,
    names_of_frame,
    parse_definition,
    without_warnings_of_torch,
)
from modkit.nn.module import Module, ModuleType


InstanceT = TypeVar("InstanceT")


class ScriptMeta(TorchScriptMeta, ModuleType):
    """Collects the script methods of a class as torch's metaclass does, and compiles its instances.

    The instance itself is the wrapper of the C++ module. Torch keeps a second object behind it, and
    every access and call goes through that. Every ScriptModule of torch is an instance of
    ``modkit.jit.ScriptModule``.
    """

    def mro(cls) -> list[type]:  # noqa: N805 - a metaclass
        """Put torch's classes of wrappers last.

        Torch's RecursiveScriptModule overrides many methods with functions that only raise.

        Returns:
            The classes in the order in which attributes are looked up.
        """
        order = type.mro(cls)
        last = [base for base in order if base in WRAPPERS]
        return [*(base for base in order[:-1] if base not in last), *last, order[-1]]

    def __call__(
        cls: type[InstanceT],  # noqa: N805 - a metaclass
        *args: Any,
        **kwargs: Any,
    ) -> InstanceT:
        module: Any = type.__call__(cls, *args, **kwargs)
        if ENABLED and isinstance(type(module), ScriptMeta) and "_c" not in module.__dict__:
            _compile(module)
        return cast("InstanceT", module)

    @property
    def __signature__(cls) -> inspect.Signature:  # noqa: N805 - a metaclass
        """The signature of the constructor: ``inspect`` would take that of ``__call__``."""
        return inspect.signature(partial(cast("Any", cls).__init__, None))

    def __instancecheck__(cls, instance: object) -> bool:  # noqa: N805 - a metaclass
        if cls is ScriptModule:
            return isinstance(instance, torch.jit.ScriptModule)
        return super().__instancecheck__(instance)

    def __subclasscheck__(cls, subclass: type) -> bool:  # noqa: N805 - a metaclass
        if cls is ScriptModule:
            return issubclass(subclass, torch.jit.ScriptModule)
        return super().__subclasscheck__(subclass)


def _compile(module: Any) -> None:
    """Compile an instance of a user's class, and make it the wrapper of the C++ module."""
    defined: dict[str, Any] = module.__dict__.pop(DEFINED, {})

    def stubs_for(submodule: Any) -> list[Any]:
        if not hasattr(type(submodule), "_methods"):
            return cast("list[Any]", methods_to_compile(submodule))
        stubs = dict(type(submodule)._methods)
        if submodule is module:
            stubs.update(defined)
        return [stub for _, stub in sorted(stubs.items())]

    with without_warnings_of_torch():
        # An instance with methods of its own cannot share its compiled type with another.
        inner = create_script_module(module, stubs_for, share_types=not defined)

    children = wrap_children(inner, module, {})
    concrete_type = inner._concrete_type
    compiled = {*concrete_type.get_attributes(), *(name for name, _ in concrete_type.get_modules())}
    # Python looks in the dict first, so attributes that C++ holds must not be there.
    for name in compiled - BOOKKEEPING:
        module.__dict__.pop(name, None)

    bind(module, inner._c, children, concrete_type)
    methods = {k: v for k, v in inner.__dict__.items() if isinstance(v, ScriptMethod)}
    module.__dict__.update(methods)


def script_method(fn: FunctionT) -> FunctionT:
    """Mark a method of a subclass of ``ScriptModule`` for compilation.

    Same as ``torch.jit.script_method``.

    Args:
        fn: The method. Names that it uses are looked up where the class is defined.

    Returns:
        What the metaclass compiles; the method itself with ``PYTORCH_JIT=0``.

    Raises:
        RuntimeError: If the code uses Python that TorchScript does not support.

    Example:
        >>> from modkit import jit
        >>> class Twice(jit.ScriptModule):
        ...     @jit.script_method
        ...     def forward(self, x):
        ...         return x * 2
    """
    give_notice("script_method")
    if not ENABLED:
        return fn
    # One frame up is the body of the class, two frames up the scope around it.
    definition = method_definition(fn, fn.__name__, self_name="ScriptModule")
    return cast("FunctionT", MethodStub(names_of_frame(frames_up=2), definition, fn))


def _without_type(module: Any, name: str, value: Any) -> Any:
    """Return the value of a ``torch.jit.Attribute``, and enter its type on the class."""
    if not ENABLED or not isinstance(value, torch.jit.Attribute):
        return value

    cls = type(module)
    if "__annotations__" not in cls.__dict__:
        # The compiler reads the annotations of one class, so those of the user's bases are copied.
        bases = [base for base in cls.__mro__ if isinstance(base, ScriptMeta)]
        theirs = [base for base in bases if "_disable_script_meta" not in vars(base)]
        annotations: dict[str, Any] = {}
        for base in reversed(theirs):
            annotations.update(inspect.get_annotations(base))
        cls.__annotations__ = annotations
    cls.__annotations__[name] = value.type
    return value.value


class _Forward:
    """Finds the compiled ``forward`` before ``Module.forward``, which only raises.

    ``__getattr__`` enters it into the instance's dict. As this is not a data descriptor, that entry
    comes first at the next access.
    """

    def __get__(self, module: Any, owner: type) -> Any:
        if module is None:
            raise AttributeError("forward")
        return module.__getattr__("forward")


class ScriptModule(Module, torch.jit.ScriptModule, metaclass=ScriptMeta):
    """A wrapper of the C++ ``torch::jit::Module``, with the interface of a module.

    ``modkit.jit.script``, ``trace``, ``load`` and ``freeze`` return one. An instance of a subclass
    with methods marked with ``script_method`` is compiled when its constructor has returned.

    modkit: ``isinstance(x, ScriptModule)`` is True for every ScriptModule of torch. Casts, hooks,
    ``requires_grad_()``, ``to_empty()`` and access to members by path work, and an existing
    parameter or buffer can be registered again. Containers iterate over their compiled children,
    and compiled properties are read and set. A module in several places stays one. A deep copy can
    be trained; it keeps ties, hooks, plain attributes and the class. Buffers that are not
    persistent stay out of ``state_dict()``. ``torch.compile`` runs the code of TorchScript instead
    of refusing it.
    """

    # Keeps torch's metaclass from compiling: ours does.
    _disable_script_meta = True

    forward: Callable[..., Any] = cast("Any", _Forward())

    @classmethod
    def from_torch(cls, module: torch.jit.ScriptModule) -> "ScriptModule":
        """Return a ScriptModule of modkit that shares the C++ module of one of torch.

        Loaded tensors that are parameters become ``Parameter``. A module of modkit, or of a user's
        class, is returned as it is. Torch has no such method.

        Args:
            module: The result of a function of ``torch.jit``.

        Returns:
            The module of modkit, which shares all state.

        Raises:
            TypeError: If ``module`` is not a ScriptModule.
        """
        if not isinstance(cast("object", module), torch.jit.ScriptModule):
            raise TypeError(
                "ScriptModule.from_torch takes a torch.jit.ScriptModule, not a "
                f"{torch.typename(module)}; modkit.jit.script and trace compile other modules"
            )
        if type(module) not in WRAPPERS:
            return cast("ScriptModule", module)
        wrapped: ScriptModule = wrap_torch(module)
        make_parameters(wrapped)
        return wrapped

    def define(self, src: str) -> None:
        """Compile a method from source; names in it are looked up in the calling function.

        Modules of one compiled type share their methods. A method defined in a constructor is
        compiled with the instance, which then has a type of its own.

        Args:
            src: The source of one method, as ``def name(self, ...): ...``.

        modkit: Names are looked up in the caller's scope also if the class has script methods, and
        each instance whose constructor calls ``define`` runs its own code.

        Raises:
            RuntimeError: If the source does not compile, or the type has a method of that name.
        """
        names = names_of_frame(frames_up=1)
        cpp = self.__dict__.get("_c")
        if cpp is None:
            definition = parse_definition(src)
            stubs = vars(self).setdefault(DEFINED, {})
            stubs[definition.name().name] = MethodStub(names, definition, None)
            return
        with without_warnings_of_torch():
            cpp._define(self._concrete_type, src, names)

    def __getattr__(self, name: str) -> Any:
        look_up: Any = find if "_c" in self.__dict__ else torch.nn.Module.__getattr__
        return look_up(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if "_c" in self.__dict__:
            assign(self, name, value)
        else:
            super().__setattr__(name, _without_type(self, name, value))

    def _get_name(self) -> str:
        return str(self.__dict__.get("_name") or type(self).__name__)

    def extra_repr(self) -> str:
        """Return the name of the compiled class, unless it is that of the instance.

        Returns:
            Text for ``repr()``.
        """
        is_ours = "_disable_script_meta" in vars(type(self))
        return f"original_name={self.original_name}" if is_ours else ""

    def save(self, f: Any, _extra_files: Mapping[str, str | bytes] | None = None) -> None:
        """Write an archive to a path, or to an open file.

        Args:
            f: A path, or a file that is open for writing.
            _extra_files: Further files for the archive: name to content, as str or bytes.

        modkit: A path is written atomically, and an open file is written to; see
        ``modkit.jit.save``.

        Raises:
            TypeError: If an extra file is neither str nor bytes.
            RuntimeError: If the folder does not exist, or compiled code calls a method of Python.
            OSError: If the file cannot be written.
        """
        _archives.save(self, f, _extra_files)

    def save_to_buffer(self, _extra_files: Mapping[str, str | bytes] | None = None) -> bytes:
        """Return the archive as bytes.

        Args:
            _extra_files: Further files for the archive: name to content, as str or bytes.

        Returns:
            What ``modkit.jit.load`` and torch read.

        Raises:
            TypeError: If an extra file is neither str nor bytes.
            RuntimeError: If compiled code calls a method of Python.
        """
        files = _archives.with_record(self, _extra_files)
        return cast("bytes", self._c.save_to_buffer(_extra_files=files))

    def __reduce_ex__(self, protocol: Any) -> Any:
        if "_c" in self.__dict__:
            try:
                # The error that pickling the C++ module would raise.
                self._c.__getstate__()
            except RuntimeError as error:
                add_note(
                    error, "Save a ScriptModule with modkit.jit.save() instead of pickling it."
                )
                raise
        return super().__reduce_ex__(protocol)

    def __copy__(self) -> Self:
        return cast("Self", _copies.shallow(self))

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return cast("Self", _copies.deep(self, memo))

    def _reconstruct(self, cpp_module: Any) -> None:
        # In-place quantization calls this.
        rewrap(self, cpp_module)

    def _replicate_for_data_parallel(self) -> Any:
        replica = blank(RecursiveScriptModule)
        bind(replica, self._c._replicate_for_data_parallel(), {})
        return replica


class RecursiveScriptModule(ScriptModule, TorchRecursiveScriptModule):  # type: ignore[misc]
    """The result of ``script``, ``load`` and ``freeze``.

    Python looks special methods up in the class, so those of containers, and compiled ones, are
    here. Where a module has none, the error is torch's.
    """

    _disable_script_meta = True

    compile = TorchRecursiveScriptModule.compile

    def _special(self, name: str, *args: Any) -> Any:
        if not self._c._has_method(name):
            raise NotImplementedError
        return self._c._get_method(name)(*args)

    def __dir__(self) -> list[str]:
        names: list[str] = [*cast("Any", super()).__dir__()]
        container = kind(self)
        if container:
            # Torch lists those of the container that was compiled.
            cls = torch.nn.ModuleDict if container == "mapping" else torch.nn.Sequential
            names += [name for name in dir(cls) if name.startswith("__")]
        return sorted({*names})

    def __len__(self) -> int:
        return cast("int", self._special("__len__"))

    def __iter__(self) -> Iterator[Any]:
        container = kind(self)
        if not container:
            return cast("Iterator[Any]", self._special("__iter__"))
        return iter(self._modules if container == "mapping" else self._modules.values())

    def __getitem__(self, index: Any) -> Any:
        return item(self, index) if kind(self) else self._special("__getitem__", index)

    def __contains__(self, key: Any) -> bool:
        container = kind(self)
        if not container:
            return bool(self._special("__contains__", key))
        if container == "mapping":
            return key in self._modules
        if self._c._has_method("__contains__"):
            return bool(self._special("__contains__", key))
        return any(key is child for child in self._modules.values())

    def __bool__(self) -> bool:
        return bool(self._special("__bool__")) if self._c._has_method("__bool__") else True


def _of_forward(name: str) -> property:
    """Return torch's property of a compiled ``forward``, for a class whose own one only raises."""

    def read_compiled(module: Any) -> Any:
        # A child that was not called while its parent was traced has none.
        if not module._c._has_method("forward"):
            raise AttributeError(name)
        # Looked up here: without the compiler, torch's class has no such property.
        read = getattr(TorchRecursiveScriptModule, name).fget
        return read(SimpleNamespace(forward=module._c._get_method("forward")))

    return property(read_compiled)


class TracedModule(ScriptModule, TorchTracedModule):  # type: ignore[misc]
    """A module below one that ``trace`` returns; it cannot be called."""

    _disable_script_meta = True

    forward = TorchTracedModule.forward

    code = _of_forward("code")
    inlined_graph = _of_forward("inlined_graph")
    code_with_constants = _of_forward("code_with_constants")


class TopLevelTracedModule(ScriptModule, TorchTopLevelTracedModule):  # type: ignore[misc]
    """The result of ``trace`` for a module."""

    _disable_script_meta = True


WRAPPERS[TorchRecursiveScriptModule] = RecursiveScriptModule
WRAPPERS[TorchTracedModule] = TracedModule
WRAPPERS[TorchTopLevelTracedModule] = TopLevelTracedModule

if not TYPE_CHECKING and not ENABLED:
    # With PYTORCH_JIT=0 a user's class is a plain module, as in torch. Archives still load.
    class ScriptModule(Module, torch.jit.ScriptModule, metaclass=ScriptMeta):
        """A module that is not compiled, as the environment variable PYTORCH_JIT is 0."""

        _disable_script_meta = True
