import pytest
import safetensors.torch
import torch
from torch import nn

import modkit
from modkit.distributed import export_average
from tests.cases import for_each
from tests.unit.averaging.recipes import network, set_to


class Odd(nn.Module):
    """A model with all that a file may have trouble with."""

    def __init__(self) -> None:
        super().__init__()
        self.bits = nn.Parameter(torch.arange(3, dtype=torch.uint8), requires_grad=False)
        self.weight = nn.Parameter(torch.arange(6.0).reshape(2, 3).t())
        self.twin = self.weight
        self.brief = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        self.narrow = nn.Parameter(torch.ones(5, dtype=torch.float64)[1:3])
        self.empty = nn.Parameter(torch.ones(0, 2))
        self.scalar = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("flags", torch.tensor([True, False, True]))


def averaged_odd() -> "modkit.EMA[Odd]":
    """Return an average of such a model that lies between two of its states."""
    ema = modkit.EMA(Odd(), decay=0.5)
    ema.update()
    with torch.no_grad():
        ema.model.weight.add_(2.0)
    ema.update()
    return ema


def test_files_of_safetensors_are_those_of_the_library(tmp_path) -> None:
    """Each dtype, shape and stride comes back; each tensor begins where its numbers may begin."""
    ema = averaged_odd()
    path = tmp_path / "average.safetensors"
    export_average(ema, path)
    found = safetensors.torch.load_file(path)
    expected = ema.averaged_model().state_dict()

    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
    assert torch.equal(found["weight"], torch.arange(6.0).reshape(2, 3).t() + 1.0)
    with safetensors.safe_open(path, framework="pt") as file:
        assert file.metadata() == {"format": "pt", "modkit.versions": '{"": 1}'}
    assert [one.name for one in tmp_path.iterdir()] == ["average.safetensors"]


def test_files_of_torch_keep_ties_and_versions(tmp_path) -> None:
    """Tied tensors share one storage; the file is not larger than its contents."""
    ema = averaged_odd()
    export_average(ema, tmp_path / "odd.pt")
    ema_of_layers = modkit.EMA(network())
    ema_of_layers.update()
    export_average(ema_of_layers, tmp_path / "net.pt")
    found = torch.load(tmp_path / "odd.pt")
    versions = torch.load(tmp_path / "net.pt")._metadata

    assert found["weight"].data_ptr() == found["twin"].data_ptr()
    assert found["narrow"].untyped_storage().nbytes() == 16
    assert found["weight"].requires_grad is False
    assert versions == network().state_dict()._metadata
    model = network().append(network()[1])
    model.append(model[1])
    assert modkit.EMA(model).state_dict()["versions"] == {"": 1, "1": 2, "4": 2, "5": 2}


@pytest.mark.parametrize("name", ["file.pt", "file.safetensors"])
def test_the_dtype_is_that_of_the_model_or_the_one_asked_for(name, tmp_path) -> None:
    """An average that is kept wider is rounded once; integers stay what they are."""
    model = network(torch.bfloat16)
    ema = modkit.EMA(model, decay=0.75)
    for value in (1.0, 2.0):
        set_to(model, value)
        ema.update()
    read = safetensors.torch.load_file if name.endswith("s") else torch.load
    found = []
    for dtype in (None, torch.float64):
        export_average(ema, tmp_path / name, dtype=dtype)
        found.append(read(tmp_path / name))

    assert [one["0.weight"].dtype for one in found] == [torch.bfloat16, torch.float64]
    assert all((one["0.weight"] == 1.25).all() for one in found)
    assert [one["1.num_batches_tracked"].dtype for one in found] == [torch.int64] * 2


@for_each("options", [{}, {"update_after_step": 2}])
@for_each("name", ["file.pt", "file.safetensors"])
def test_there_must_be_an_average(options, name, tmp_path) -> None:
    """Before the first update a file would hold training weights, so none is written."""
    ema = modkit.EMA(network(), **options)
    if options:
        ema.update()
    with pytest.raises(
        RuntimeError, match=r"export_average: EMA\(.*has no average yet.*Call update"
    ):
        export_average(ema, tmp_path / name)

    assert list(tmp_path.iterdir()) == []


def test_more_than_tensors_goes_into_files_of_torch_only(tmp_path) -> None:
    """A state that a module keeps in its own way is in the file, or is named as what does not fit."""

    class Extra(nn.Linear):
        def get_extra_state(self):
            return {"calls": 3}

        def set_extra_state(self, state):
            self.calls = state["calls"]

    ema = modkit.EMA(Extra(1, 1))
    ema.update()
    export_average(ema, tmp_path / "file.pt")
    with pytest.raises(ValueError, match="_extra_state is not a tensor"):
        export_average(ema, tmp_path / "file.safetensors")

    assert torch.load(tmp_path / "file.pt")["_extra_state"] == {"calls": 3}
    assert [one.name for one in tmp_path.iterdir()] == ["file.pt"]


@pytest.mark.parametrize("name", ["file.pt", "file.safetensors"])
def test_a_value_that_is_too_large_for_the_dtype(name, tmp_path) -> None:
    """It would become infinite, so nothing is written."""
    net = nn.Linear(1, 1)
    nn.init.constant_(net.weight, 70_000.0)
    ema = modkit.EMA(net)
    ema.update()
    with pytest.raises(
        ValueError, match=r"weight has the value 70000\.0, too large for torch.float16"
    ):
        export_average(ema, tmp_path / name, dtype=torch.float16)

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["file.pt", "file.safetensors"])
def test_a_file_that_cannot_be_written_leaves_the_one_before(name, tmp_path, monkeypatch) -> None:
    """The error is the system's, and what was there is there still."""
    ema = averaged_odd()
    export_average(ema, tmp_path / name)
    before = (tmp_path / name).read_bytes()
    monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError("the disk is full")))
    ema.update()
    with pytest.raises(OSError, match="the disk is full"):
        export_average(ema, tmp_path / name)

    assert (tmp_path / name).read_bytes() == before
    assert [one.name for one in tmp_path.iterdir()] == [name]
