"""The class ``Module`` and its metaclass. Its methods are functions of the files beside this one.

What torch's own function does well is inherited. Some names must *not* be defined here, because
tools compare the function with that of ``torch.nn.Module``, or read its code object: the call path,
access to attributes, ``forward``, ``get_extra_state``, ``set_extra_state`` and ``__getstate__``.
The README beside this file lists both: who compares what is inherited, and the reason for each
override.
"""

import sys
from abc import ABCMeta
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from typing_extensions import Protocol

from modkit import _tree
from modkit._upstream import skip_frames
from modkit.nn import (
    _attributes,
    _conversion,
    _hooks,
    _load_plan,
    _load_state_dict,
    _load_tensor,
    _overrides,
    _traversal,
)
from modkit.nn._overrides import TorchModule


_ClassT = TypeVar("_ClassT")

if TYPE_CHECKING:
    _ProtocolType = ABCMeta
else:
    _ProtocolType = type(Protocol)


class _NewRegistry:
    """Reads as a new, empty registry of an abstract class, so no two classes share one.

    A registry holds the virtual subclasses of a class; Python has no function that makes one alone.
    """

    def __get__(self, cls: type | None, metaclass: type) -> Any:
        return cast("Any", ABCMeta("_Abstract", (), {}))._abc_impl


class ModuleType(_ProtocolType):
    """The metaclass of ``Module``: torch's modules count as instances of ``Module``.

    It derives from the metaclass of protocols and thereby of abstract classes, so that both mix
    with modules. A user's metaclass derives from ``type(modkit.nn.Module)``.

    A class without an abstract base is made by ``type.__new__``, as fast as torch's and with the
    same ``isinstance``. It becomes an abstract class by the first call of ``register()``.
    """

    # The functions of ``abc`` read this attribute of every class whose metaclass derives from
    # ABCMeta. Picklers call them: without it, cloudpickle and dill could not pickle a class by
    # value. What a metaclass has is found after the attributes of the class and its bases.
    _abc_impl = _NewRegistry()

    if not TYPE_CHECKING:
        # Compared by identity, at C speed: dynamo looks for classes with ``==``, protocols define
        # it.
        __eq__ = object.__eq__
        __hash__ = object.__hash__
        __init__ = type.__init__

    def __new__(
        mcs, name: str, bases: tuple[type, ...], namespace: dict[str, Any], /, **kwargs: Any
    ) -> "ModuleType":
        """Make an abstract class where a base is one; elsewhere a plain one, as torch's are."""
        if "__module__" not in namespace:
            # A call of ``type()``: Python would take the file of this method for the caller's.
            module = sys._getframe(1).f_globals.get("__name__")
            namespace = {**namespace, "__module__": module}

        for base in bases:
            if "_abc_impl" in base.__dict__:
                # The metaclass of protocols has parameters called ``name`` and so on itself.
                make = ABCMeta.__new__ if kwargs else super().__new__
                return make(mcs, name, bases, namespace, **kwargs)

        # Most classes have no keyword arguments; an empty dict to unpack would take time.
        if kwargs:
            return type.__new__(mcs, name, bases, namespace, **kwargs)
        return type.__new__(mcs, name, bases, namespace)

    def mro(cls) -> list[type]:
        """Put ``Module`` directly before ``torch.nn.Module``, behind torch's mixins.

        In ``class Net(Module, TorchMixin)``, a mixin that derives from ``torch.nn.Module`` keeps
        its ``__init__`` and overrides: Python's own order would put ``Module`` before it.

        Returns:
            The classes in the order in which attributes are looked up.

        Raises:
            TypeError: If the bases have no consistent order.
        """
        bases = cls.__bases__
        if len(bases) == 1:
            # There is one order.
            return [cls, *bases[0].__mro__]

        order: list[Any] = super().mro()
        if Module not in order:
            return order

        behind = bases[bases.index(Module) + 1 :] if Module in bases else ()
        if any(TorchModule in base.__mro__ for base in behind):
            # Torch's own ``Module`` may not stand before a class that is derived from it. Python's
            # words for this depend on its release, so classes of the same names are refused by it.
            root = type("Module", (), {})
            others = {base: (root,) if base in behind else () for base in bases}
            stand_ins = [type(base.__name__, others[base], {}) for base in bases]
            stand_ins[bases.index(Module)] = root
            type(cls.__name__, tuple(stand_ins), {})

        order.remove(Module)
        order.insert(order.index(TorchModule), Module)
        return order

    def register(cls, subclass: type[_ClassT]) -> type[_ClassT]:
        """Register a virtual subclass, as ``abc.ABCMeta.register`` does.

        A class without an abstract base becomes one, with its bases up to ``Module``. Abstract
        methods of classes that exist are not enforced.

        Args:
            subclass: The class that ``issubclass`` and ``isinstance`` then accept.

        Returns:
            ``subclass``, so that this can decorate a class.

        Raises:
            AttributeError: If this is ``Module``, which in torch is not an abstract class.
            TypeError: If ``subclass`` is not a class.
            RuntimeError: If this class derives from ``subclass``.
        """
        if cls is Module:
            raise AttributeError("type object 'Module' has no attribute 'register'")
        if "_abc_impl" not in cls.__dict__:
            for base in cls.__mro__:
                if isinstance(base, ModuleType) and base is not Module:
                    _make_abstract(base)
        return super().register(subclass)

    def __setattr__(cls, name: str, value: Any) -> None:
        """Assign to the class; to ``Module``, what torch's class has removes what was assigned.

        A tool that patches a method puts back what it found, which ``Module`` may only inherit. As
        an attribute of its own, it would hide later patches of ``torch.nn.Module``, such as fx's.
        """
        if cls is not Module or value is not TorchModule.__dict__.get(name, cls):
            super().__setattr__(name, value)
        elif name in cls.__dict__:
            super().__delattr__(name)

    def __subclasses__(cls) -> list[type]:
        """Return the classes that derive directly from this one; for ``Module``, torch's too.

        Tools that accept the name of a class without its module, such as the command lines of
        jsonargparse and Lightning, look for it below the annotated class: ``ReLU`` for ``Module``.

        Returns:
            A new list.
        """
        derived: list[type] = type.__subclasses__(cast("Any", cls))
        if cls is Module:
            torch_classes = type.__subclasses__(TorchModule)
            return [each for each in torch_classes if each is not Module] + derived
        return derived

    def __instancecheck__(cls, instance: object) -> bool:
        if cls is Module:
            return isinstance(instance, TorchModule)
        if "_abc_impl" in cls.__dict__:
            return super().__instancecheck__(instance)
        return type.__instancecheck__(cls, instance)

    def __subclasscheck__(cls, subclass: type) -> bool:
        if cls is Module:
            return issubclass(subclass, TorchModule)
        if "_abc_impl" in cls.__dict__:
            return super().__subclasscheck__(subclass)
        return type.__subclasscheck__(cls, subclass)


def _make_abstract(cls: type[Any]) -> None:
    """Give a class that exists a registry of its own, and each class below it, too."""
    if "_abc_impl" not in cls.__dict__:
        cls._abc_impl = ModuleType._abc_impl
    for derived in cls.__subclasses__():
        # The registry of a base would otherwise be read as that of the derived class.
        _make_abstract(derived)


class Module(torch.nn.Module, metaclass=ModuleType):
    """Base class of all neural network modules.

    A subclass calls ``super().__init__()``, assigns parameters, buffers and child modules as
    attributes, and implements ``forward``. Calling the instance runs ``forward`` with the hooks.

    modkit: ``isinstance(x, Module)`` is True for every ``torch.nn.Module``. The metaclass of a
    subclass derives from ``type(Module)``. A method that differs from torch's says so in a
    paragraph like this one.

    Example:
        >>> import torch
        >>> import modkit.nn as nn
        >>> class Net(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.body = nn.Linear(4, 2)
        ...     def forward(self, x):
        ...         return self.body(x).relu()
        >>> Net()(torch.ones(3, 4)).shape
        torch.Size([3, 2])
    """

    # To type checkers the methods are torch's, of the same names and signatures.
    if not TYPE_CHECKING:
        register_parameter = _attributes.register_parameter
        add_module = _attributes.add_module

        named_modules = _traversal.named_modules

        apply = _conversion.apply
        _apply = _conversion._apply
        to = _conversion.to

        _get_backward_pre_hooks = _hooks._get_backward_pre_hooks

        load_state_dict = _load_state_dict.method
        _load_from_state_dict = _load_state_dict._load_from_state_dict


# A class does not inherit annotations. Reading those of a class without any stores an empty dict,
# and the compiler of TorchScript, which reads them from instances, would then not find torch's
# behind it.
Module.__annotations__ = dict(TorchModule.__annotations__)

for _file in (
    _attributes,
    _conversion,
    _hooks,
    _load_plan,
    _load_state_dict,
    _load_tensor,
    _overrides,
    _traversal,
    _tree,
):
    skip_frames(_file)
