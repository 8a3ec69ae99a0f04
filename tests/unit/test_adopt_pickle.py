import copy
import io
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import modkit
from tests.unit.adoptable import (
    BY_NAME,
    Block,
    ByName,
    Net,
    Registered,
    WithNew,
    WithReduce,
    WithState,
)


ROOT = Path(__file__).parents[2]


def through_pickle(value: Any, protocol: int = pickle.DEFAULT_PROTOCOL) -> Any:
    """Return what comes back from a pickle of ``value``."""
    return pickle.loads(pickle.dumps(value, protocol))


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickles_of_every_protocol(protocol: int) -> None:
    """An adopted model comes back adopted, with its values and its mode, from each protocol."""
    net = modkit.adopt(Net().eval())
    x = torch.randn(3, 4)

    again = through_pickle(net, protocol)

    assert [type(module) for module in again.modules()] == [type(m) for m in net.modules()]
    assert again.shared is again.blocks[0]
    assert again.shared.parent[0] is again
    assert not again.training
    assert torch.equal(again(x), net(x))


def test_loading_in_a_process_that_never_adopted(tmp_path: Path) -> None:
    """Pickle and ``torch.save`` files load where nobody has called adopt, nor imported modkit."""
    net = modkit.adopt(Net())
    x = torch.randn(3, 4)
    (tmp_path / "net.pickle").write_bytes(pickle.dumps(net))
    torch.save(net, tmp_path / "net.pt")
    torch.save({"x": x, "y": net(x)}, tmp_path / "values.pt")
    script = """
import pickle, sys, torch
folder = sys.argv[1]
values = torch.load(f"{folder}/values.pt")
with open(f"{folder}/net.pickle", "rb") as file:
    nets = pickle.load(file), torch.load(f"{folder}/net.pt", weights_only=False)
import modkit
from tests.unit.adoptable import Block, Net
for net in nets:
    assert type(net) is not Net and isinstance(net, Net), type(net)
    assert all(isinstance(module, modkit.nn.Module) for module in net.modules())
    assert torch.equal(net(values["x"]), values["y"])
    modkit.release(net)
    assert type(net) is Net and type(net.blocks[0]) is Block and type(net.head) is torch.nn.Linear
print("loaded", len(nets))
"""

    ended = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip() == "loaded 2"


def test_a_pickle_names_the_original_class() -> None:
    """A pickle holds the user's class under its own name, and none that was made by adopt."""
    names = []

    class Watching(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            names.append(f"{module}.{name}")
            return super().find_class(module, name)

    block = Watching(io.BytesIO(pickle.dumps(modkit.adopt(Block())))).load()

    assert isinstance(block, Block)
    assert "tests.unit.adoptable.Block" in names
    assert "modkit.nn.modules.linear.Linear" in names


def test_own_state_methods_are_used() -> None:
    """``__getstate__`` and ``__setstate__`` of the user's class do what they did before."""
    layer = modkit.adopt(WithState())

    again, copied = through_pickle(layer), copy.deepcopy(layer)

    assert again.handle == copied.handle == "opened again"
    assert isinstance(again, WithState)
    assert isinstance(again, modkit.nn.Linear)
    assert torch.equal(copied.weight, layer.weight)


def test_own_reduce_is_used() -> None:
    """A class that is rebuilt by its constructor comes back adopted, its children too."""
    module = modkit.adopt(WithReduce(3))

    again, copied = through_pickle(module), copy.deepcopy(module)

    assert type(again) is type(copied) is type(module)
    assert again._version_of_state == 1
    assert type(again.linear) is modkit.nn.Linear
    assert torch.equal(copied.linear.weight, module.linear.weight)


def test_arguments_of_new_are_passed() -> None:
    """``__getnewargs__`` of the user's class gives ``__new__`` its arguments."""
    module = modkit.adopt(WithNew("some"))

    again, copied = through_pickle(module), copy.deepcopy(module)

    assert again.made_with == copied.made_with == "some"
    assert type(again) is type(copied) is type(module)


def test_copyreg_is_asked() -> None:
    """A reduction that was registered for the user's class is used for its adopted instances."""
    module = modkit.adopt(Registered("made"))

    again = through_pickle(module)

    assert again.label == "made by copyreg"
    assert type(again) is type(module)


def test_a_global_name_stays_one() -> None:
    """A module that is pickled as a global variable comes back as the same object."""
    adopted = modkit.adopt(BY_NAME)
    try:
        again = through_pickle(adopted)
    finally:
        modkit.release(BY_NAME)

    assert again is BY_NAME
    assert type(BY_NAME) is ByName


def test_a_subclass_of_an_adopted_class_is_pickled_as_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A class that users derive from an adopted one is found by its own name."""
    derived = type("Derived", (type(modkit.adopt(Block())),), {"__module__": __name__})
    monkeypatch.setattr(sys.modules[__name__], "Derived", derived, raising=False)

    again = through_pickle(derived())

    assert type(again) is derived


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy])
def test_copies_are_adopted(duplicate: Any) -> None:
    """A copy has the class of what was copied, and is released on its own."""
    net = modkit.adopt(Net())

    copied = modkit.release(duplicate(net.head)), duplicate(net)
    modkit.release(copied[1])

    assert type(copied[0]) is torch.nn.Linear
    assert type(copied[1]) is Net
    assert isinstance(net, modkit.nn.Module)
