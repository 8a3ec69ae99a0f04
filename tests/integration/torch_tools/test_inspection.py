"""Classes of users in help(), debuggers, profilers of Python and mocks."""

import gc
import unittest.mock
import weakref
from collections.abc import Callable
from typing import Any

import torch

from tests.helpers import Implementation, same
from tests.integration.torch_tools.user_files import imported


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
