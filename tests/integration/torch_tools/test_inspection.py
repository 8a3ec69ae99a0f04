"""Classes of users in help(), debuggers, profilers of Python and mocks."""

import gc
import inspect
import re
import typing
import unittest.mock
import weakref
from collections.abc import Callable
from typing import Any

import torch

from tests.cases import for_each
from tests.helpers import Implementation, same
from tests.integration.torch_tools.user_files import imported


def shown(text: str) -> str:
    """Return a text with torch's name for the base class, and without addresses and folders.

    Once something was compiled in this process, torch's ``Module.__init__`` has lost its docstring to
    a wrapper, and ``pydoc`` shows that of ``object``: what ``__init__`` inherits is left out.
    """
    text = text.replace("modkit.nn.Module", "torch.nn.modules.module.Module")
    text = re.sub(r"\n[ |]*Initialize (self\.|internal Module state).*", "", text)
    return re.sub(r"0x[0-9a-f]+", "0x", re.sub(r'(File )?"?/\S*/(\w+\.py)"?', r"\2", text))


def parameters(function: Any) -> list[Any]:
    """Return names, kinds and defaults. Methods that modkit overrides have more annotations."""
    found = inspect.signature(function).parameters.values()
    return [(each.name, each.kind, each.default) for each in found]


@for_each("name", ["Block", "Wide", "Net"])
def test_the_inspect_module(name: str) -> None:
    """Signatures, sources, comments, kinds of members and annotations are those of torch."""

    def scenario(impl: Implementation) -> Any:
        with imported(impl.nn) as users:
            cls = getattr(users, name)
            net = cls(users.Block()) if name == "Net" else cls()
            kinds = {each.name: each.kind for each in inspect.classify_class_attrs(cls)}
            functions = dict(inspect.getmembers(net, inspect.ismethod))
            return (
                shown(str(inspect.signature(cls))),
                {name: parameters(each) for name, each in functions.items()},
                inspect.getsource(cls).replace(impl.nn.__name__, "nn"),
                inspect.getsourcelines(cls.forward),
                inspect.getdoc(cls),
                inspect.getdoc(cls.forward),
                kinds,
                sorted(functions),
                sorted(name for name, _ in inspect.getmembers(net)),
                [
                    type(inspect.getattr_static(net, name))
                    for name in ("forward", "training", "_modules")
                ],
                inspect.isabstract(cls),
                inspect.isclass(cls),
                typing.get_type_hints(cls.forward),
                inspect.getmodule(cls).__name__,
                [base.__name__ for base in inspect.getmro(cls) if base.__name__ != "Module"],
                inspect.unwrap(cls.forward) is cls.forward,
            )

    assert same(scenario)[0] == "returned"


def refusal(call: Callable[[], Any]) -> str:
    """Return the type of what a call returns, or the text of its exception."""
    try:
        return type(call()).__name__
    except (TypeError, AttributeError) as error:
        return str(error)


def test_mocks_take_the_place_of_modules() -> None:
    """``create_autospec``, ``Mock(spec=)`` and ``patch.object`` follow a user's class."""

    def scenario(impl: Implementation) -> Any:
        with imported(impl.nn) as users:
            mocked = unittest.mock.create_autospec(users.Block, instance=True)
            mocked.forward.return_value = 3
            calls = (mocked.forward, lambda: mocked.gone, lambda: mocked(1, 2))
            refused = [refusal(call) for call in calls]
            holder = users.Net(users.Block())
            holder.body = unittest.mock.Mock(spec=impl.nn.Module, return_value=torch.ones(1, 4))
            with unittest.mock.patch.object(users.Block, "forward", autospec=True) as forward:
                forward.side_effect = lambda self, x: x + 1
                patched = users.Block()(torch.ones(1, 4))
            with unittest.mock.patch.object(
                impl.nn.Linear, "forward", return_value=torch.zeros(1)
            ) as layer:
                called = users.Block()(torch.ones(1, 4)), layer.call_count
            return (
                mocked.forward(1),
                refused,
                isinstance(mocked, users.Block),
                isinstance(mocked, impl.nn.Module),
                isinstance(holder.body, impl.nn.Module),
                patched,
                called,
                users.Block()(torch.ones(1, 4)),
            )

    assert same(scenario)[0] == "returned"


def test_a_deleted_network_is_freed_at_once(impl: Implementation) -> None:
    """A network has no cycle of references, before and after its use."""
    with imported(impl.nn) as users:
        net = users.Net(users.Wide(4, 4))
        net(torch.ones(1, 4)).sum().backward()
        net.load_state_dict(net.state_dict())
        gone = [weakref.ref(each) for each in net.modules()]
        gc.disable()
        try:
            del net
            assert [each() for each in gone] == [None] * len(gone)
        finally:
            gc.enable()
