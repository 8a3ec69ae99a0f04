from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import modkit
from modkit.distributed import export_average
from tests.distributed.averages import networks
from tests.distributed.launcher import run


FILES = ["average.safetensors", "average.pt"]


def read(path: Path) -> Any:
    """Read a file with the library of its format."""
    if path.suffix == ".safetensors":
        return safetensors.torch.load_file(path)
    return torch.load(path)


def export(folder: Path) -> dict[str, Any]:
    """Write the averages of a sharded model to several files."""
    ema = modkit.EMA(
        networks.split(networks.network(torch.bfloat16)), decay=[0.5, 0.9], device="cpu"
    )
    with pytest.raises(RuntimeError, match="has no average yet"):
        export_average(ema, folder / "raw.pt")
    networks.train(ema, networks.sgd(ema.model), 0, 4)
    with torch.no_grad():
        # The root has whole parameters after it.
        ema.model.eval()(torch.ones(2, 5, dtype=torch.bfloat16))
    for name in FILES:
        export_average(ema, folder / name, index=1, dtype=torch.float32)
        export_average(ema, folder / f"as-it-is-{name}", index=1)
    return {
        "average": networks.averages_of(ema, 1),
        "order": list(ema.model.state_dict()),
    }


def export_all(folder: Path) -> dict[str, Any]:
    """Run on each of three ranks."""
    places = {name: folder / name for name in ("sharded", "mixed", "wrapped", "nowhere")}
    for place in places.values():
        place.mkdir(exist_ok=True)
    found = {"sharded": export(places["sharded"])}
    export_mixed(places["mixed"])
    return {
        **found,
        "wrapped": export_wrapped(places["wrapped"]),
        "nowhere": export_nowhere(places["nowhere"]),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return where the files are."""
    return tmp_path_factory.mktemp("exports")


@pytest.fixture(scope="module")
def found(folder: Path) -> list[dict[str, Any]]:
    """Return what each rank has seen."""
    return run(3, export_all, folder, folder=folder / "run", limit=120.0)


def test_the_file_is_that_of_one_process(folder: Path, found: Any) -> None:
    """It loads into a plain model, and has all bits of the average, or those of the model's dtype."""
    folder = folder / "sharded"
    expected = found[0]["sharded"]
    average = expected["average"]
    narrow = {
        name: tensor.bfloat16() if tensor.is_floating_point() else tensor
        for name, tensor in average.items()
    }

    for name in FILES:
        wide, narrowed = read(folder / name), read(folder / f"as-it-is-{name}")
        assert networks.differing(narrowed, narrow) == []
        assert (
            networks.differing(
                wide, {**average, **{k: v.float() for k, v in average.items() if "running" in k}}
            )
            == []
        )
        networks.network().load_state_dict(wide)
        networks.network(torch.bfloat16).load_state_dict(narrowed)
    assert list(torch.load(folder / FILES[1])) == expected["order"]
    # Nothing else is left there.
    assert len(list(folder.iterdir())) == 4


class Mixed(nn.Module):
    """A model with a tied tensor, one of a byte, one that is not saved, and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.ones(1))
        self.frozen = nn.Parameter(torch.arange(3.0), requires_grad=False)
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("cache", torch.ones(3), persistent=False)
        self.register_buffer("count", torch.tensor(5))


def export_mixed(folder: Path) -> None:
    """Write the average of such a model, without what is frozen in it."""
    model = Mixed()
    torch.distributed.fsdp.fully_shard(model)
    ema = modkit.EMA(model, decay=0.5, exclude="frozen")
    for value in (0.0, 4.0):
        with torch.no_grad():
            model.embedding.weight.fill_(value)
        ema.update()
    for name in FILES:
        export_average(ema, folder / name)


@pytest.mark.parametrize("name", FILES)
def test_a_file_has_what_a_state_dict_has(name: str, folder: Path, found: Any) -> None:
    """Both names of what is tied, what is not averaged, no buffers that are not saved."""
    content, model = read(folder / "mixed" / name), Mixed()
    model.load_state_dict(content)

    assert set(content) == set(Mixed().state_dict())
    for key in ("embedding.weight", "head.weight"):
        assert torch.equal(content[key], torch.full((7, 4), 2.0))
    assert torch.equal(content["frozen"], torch.arange(3.0))
    assert torch.equal(content["mask"], torch.tensor([True, False, True]))
    assert content["count"].item() == 5


def export_wrapped(folder: Path) -> dict[str, Any]:
    """Write the average of a model that is wrapped."""
    torch.manual_seed(torch.distributed.get_rank())
    model = DistributedDataParallel(networks.network())
    ema = modkit.EMA(model, decay=0.5)
    networks.train(ema, networks.sgd(model), 0, 3)
    export_average(ema, folder / "average.pt")
    # Each rank whose call has returned can read it.
    return {"file": torch.load(folder / "average.pt"), "average": networks.averages_of(ema)}


def test_the_names_are_those_of_the_model_itself(found: Any) -> None:
    """Names have no prefixes of wrappers, and the file exists on all ranks when the call returns."""
    for results in found:
        file = results["wrapped"]["file"]
        assert networks.differing(file, results["wrapped"]["average"]) == []
        assert file._metadata["1"] == {"version": 2}
        assert file._metadata.keys() == networks.network().state_dict()._metadata.keys()  # type: ignore[attr-defined]


def export_nowhere(folder: Path) -> dict[str, str]:
    """Write to where there is no folder, and what has no place in the format."""
    ema = networks.trained(2, decay=0.5)
    found = {}
    for name in FILES:
        with pytest.raises((OSError, RuntimeError)) as caught:
            export_average(ema, folder / "none" / name)
        found[name] = f"{type(caught.value).__name__}: {caught.value}"
    ema.model.register_buffer("angles", torch.ones(1, dtype=torch.complex128))
    with pytest.raises(ValueError, match="safetensors") as unnamed:
        export_average(ema, folder / FILES[0])
    found["dtype"] = str(unnamed.value)
    del ema.model.angles
    with pytest.raises(IndexError):
        export_average(ema, folder / FILES[0], index=1)
    # They have not lost step with one another.
    export_average(ema, folder / FILES[0])
    return found


def test_all_processes_know_that_a_file_is_not_there(folder: Path, found: Any) -> None:
    """All ranks raise the error of rank 0, and none of them is left waiting."""
    first, second, third = (results["nowhere"] for results in found)

    assert first == second == third
    for name in FILES:
        assert "No such file" in first[name] or "does not exist" in first[name]
    assert "angles is torch.complex128" in first["dtype"]
    assert [path.name for path in (folder / "nowhere").iterdir()] == [FILES[0]]
