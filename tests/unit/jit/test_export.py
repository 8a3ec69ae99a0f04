import io

import pytest
import torch
from torch import Tensor

import modkit.nn as nn
from modkit.errors import (
    ConversionError,
    FileError,
)
from modkit.jit._archive import check_archive, inspect
from modkit.jit._archive_seal import seal
from modkit.jit._export import EXPORT, add_export, export_files, read_export, to_export
from tests.integration.torchscript import scripted_tests
from tests.unit.jit.archives import archive, compiled, loaded, place_of, traced


pytestmark = scripted_tests

INPUTS = torch.linspace(-1, 1, 6).reshape(2, 3)


class Loops(torch.nn.Module):
    """A module with a loop whose length depends on the input."""

    def forward(self, inputs: Tensor) -> Tensor:
        """Add the rows one after another."""
        total = inputs[0]
        for index in range(inputs.size(0)):
            total = total + inputs[index]
        return total


class Several(torch.nn.Module):
    """A module with several outputs in several containers."""

    def forward(self, inputs: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return the inputs in pieces."""
        return inputs + 1, [inputs.sum(), inputs * 2]


class Draws(torch.nn.Module):
    """A module that draws random numbers."""

    def forward(self, inputs: Tensor) -> Tensor:
        """Drop half of the inputs."""
        return torch.nn.functional.dropout(inputs, 0.5, True)


class Writes(torch.nn.Module):
    """A module that writes to its input and to a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        """Count the call, and add one to the input in place."""
        self.calls.add_(1)
        return inputs.add_(1)


def network():
    """Return a network with parameters and buffers."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Dropout()).eval()


@pytest.mark.parametrize("how", ["script", "trace", "load", "freeze", "plain"])
def test_outputs_and_weights_stay(how):
    """A program computes what the module computes, and has its weights under their names."""
    net = network()
    module = {
        "script": lambda: compiled(net),
        "trace": lambda: traced(net, INPUTS),
        "load": lambda: loaded(compiled(net).save_to_buffer()),
        "freeze": lambda: torch.jit.freeze(compiled(net)),
        "plain": lambda: net,
    }[how]()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}

    program = to_export(module, (INPUTS,))
    torch.testing.assert_close(net(INPUTS), program.module()(INPUTS))
    if how != "freeze":
        assert {name: tuple(each.shape) for name, each in program.state_dict.items()} == {
            name: tuple(each.shape) for name, each in net.state_dict().items()
        }
    assert all(torch.equal(before[name], each) for name, each in module.state_dict().items())


@pytest.mark.parametrize("module", [Several(), Draws()], ids=lambda each: type(each).__name__)
def test_what_is_compared(module):
    """Outputs in containers are compared one by one, and random ones with the same numbers."""
    state = torch.random.get_rng_state()
    program = to_export(compiled(module), (INPUTS,))

    assert torch.equal(state, torch.random.get_rng_state())
    torch.manual_seed(0)
    found = program.module()(INPUTS)
    torch.manual_seed(0)
    expected = module(INPUTS)
    for one, two in zip(torch.utils._pytree.tree_leaves(found), _leaves(expected), strict=True):
        torch.testing.assert_close(one, two)


def _leaves(value):
    """Return the tensors in tuples and lists."""
    return torch.utils._pytree.tree_leaves(value)


def test_neither_module_nor_inputs_are_written_to():
    """A module that writes to its buffers and inputs finds both as they were."""
    module, inputs = compiled(Writes()), INPUTS.clone()
    to_export(module, (inputs,))

    assert module.state_dict()["calls"].item() == 0
    assert torch.equal(INPUTS, inputs)


def test_the_code_of_the_module_stays():
    """The conversion rewrites a copy, so the module has the code and the graph that it had."""
    module = compiled(network())
    before = module.code, str(module.graph), module.save_to_buffer()
    to_export(module, (INPUTS,))

    assert before == (module.code, str(module.graph), module.save_to_buffer())


def test_the_node_that_stops_it_is_named():
    """A loop over an unknown number of rows is named, with its line in the source."""
    with pytest.raises(ConversionError) as caught:
        to_export(compiled(Loops()), (INPUTS,))

    assert caught.value.node == "prim::Loop"
    assert "for index in range(inputs.size(0)):" in caught.value.source
    assert "prim::Loop cannot be converted" in str(caught.value)
    assert str(caught.value).endswith(caught.value.source)


def test_training_mode_is_pointed_out():
    """Batch normalization has a loop in training mode; the error says what helps."""
    module = compiled(network()).train()

    with pytest.raises(ConversionError, match=r"eval\(\) leaves less to convert"):
        to_export(module, (INPUTS,))
    assert to_export(module.eval(), (INPUTS,)).module() is not None


def test_no_node_is_to_blame():
    """Where torch fails before it looks at nodes, the error says so."""
    query = torch.ones(3, 1, 4)

    with pytest.raises(ConversionError, match="no single node is to blame") as caught:
        to_export(compiled(torch.nn.MultiheadAttention(4, 2)), (query, query, query))
    assert caught.value.node is None
    assert caught.value.__cause__ is not None


def test_results_that_differ(monkeypatch):
    """A program that computes something else is not returned."""
    other = torch.export.export(torch.nn.Linear(3, 4), (INPUTS,))
    monkeypatch.setattr("modkit.jit._export.convert_script", lambda module, args: other)

    with pytest.raises(ConversionError, match="the program computes something else") as caught:
        to_export(compiled(network()), (INPUTS,))
    assert "Mismatched elements" in str(caught.value)


def test_tolerances(monkeypatch):
    """Differences within the tolerances that are given are none."""
    other = torch.export.export(network(), (INPUTS,))
    scripted = compiled(network())
    monkeypatch.setattr("modkit.jit._export.convert_script", lambda module, args: other)
    with torch.no_grad():
        other.state_dict["0.bias"] += 0.01

    with pytest.raises(ConversionError, match="something else"):
        to_export(scripted, (INPUTS,))
    assert to_export(scripted, (INPUTS,), rtol=0, atol=0.1) is other


def test_arguments_of_the_wrong_kind():
    """Inputs are a tuple; a ScriptModule is converted without keywords."""
    with pytest.raises(TypeError, match="args has to be a tuple of inputs, not Tensor"):
        to_export(network(), INPUTS)
    with pytest.raises(TypeError, match="args only, not kwargs"):
        to_export(compiled(network()), (), {"input": INPUTS})


def test_keywords_of_a_plain_module():
    """A plain module may take inputs by name."""
    program = to_export(network(), (), {"input": INPUTS})

    torch.testing.assert_close(network()(INPUTS), program.module()(input=INPUTS))


@pytest.mark.parametrize("sealing", [False, True])
def test_a_program_beside_the_torchscript(tmp_path, sealing):
    """One file serves both: TorchScript reads it as before, and the program comes back from it."""
    net, path = network(), tmp_path / "net.pt"
    scripted = compiled(net)
    scripted.save(path, _extra_files={"labels.txt": "cat"})
    if sealing:
        seal(path)
    add_export(path, to_export(scripted, (INPUTS,)))

    assert check_archive(path, extra_files=["labels.txt", EXPORT])
    assert torch.equal(scripted(INPUTS), torch.jit.load(path)(INPUTS))
    torch.testing.assert_close(net(INPUTS), read_export(path).module()(INPUTS))
    torch.testing.assert_close(net(INPUTS), read_export(path.read_bytes()).module()(INPUTS))
    assert [path] == list(tmp_path.iterdir())


def test_a_program_as_an_extra_file_of_torch():
    """What is given to torch as an extra file is found, by modkit and by torch.export."""
    scripted = compiled(network())
    files = export_files(to_export(scripted, (INPUTS,)))
    data = scripted.save_to_buffer(_extra_files=files)
    extra = {EXPORT: ""}
    torch.jit.load(io.BytesIO(data), _extra_files=extra)

    theirs = torch.export.load(io.BytesIO(extra[EXPORT]))
    assert torch.equal(theirs.module()(INPUTS), read_export(data).module()(INPUTS))
    assert EXPORT in inspect(data).extra_files


def test_an_archive_gets_one_program(tmp_path):
    """A second program is refused, and the file stays as it was."""
    path = tmp_path / "net.pt"
    path.write_bytes(compiled(network()).save_to_buffer())
    program = to_export(network(), (INPUTS,))
    add_export(path, program)
    before = path.read_bytes()

    with pytest.raises(ValueError, match=r"has an extra file 'export\.pt2' already"):
        add_export(path, program)
    assert path.read_bytes() == before


def test_archives_without_a_program():
    """An archive that has none is a KeyError that says why; a damaged one is refused."""
    with pytest.raises(KeyError, match="it was saved without export_args"):
        read_export(archive())

    data = bytearray(
        compiled(network()).save_to_buffer(
            _extra_files=export_files(to_export(network(), (INPUTS,)))
        )
    )
    data[place_of(bytes(data), f"archive/extra/{EXPORT}") + 200] ^= 1
    with pytest.raises(FileError, match=r"export\.pt2 does not match its checksum"):
        read_export(bytes(data))
