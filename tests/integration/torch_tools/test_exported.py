"""Programs of torch.export: saved and loaded, packages of AOTInductor."""

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.export import Dim, export

from tests.helpers import Implementation
from tests.integration.networks import agree, make_batch, make_net


def test_a_saved_program_takes_batches_of_any_size() -> None:
    """A program with a dynamic batch goes through ``torch.export.save()`` and ``load()``."""

    def scenario(impl: Implementation) -> Any:
        net, batch = make_net(impl.nn, "free"), make_batch("free")
        program = export(net, (batch,), dynamic_shapes=({0: Dim("batch", min=2)},))
        file = io.BytesIO()
        torch.export.save(program, file)
        file.seek(0)
        loaded = torch.export.load(file)

        outputs = [loaded.module()(inputs) for inputs in (batch, torch.cat([batch, batch]))]
        return outputs, dict(loaded.state_dict), loaded.graph_module.code

    (output, longer), _, _ = agree(scenario)

    assert torch.equal(output, make_net(torch.nn, "free")(make_batch("free")))
    assert longer.shape == (8, 3)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # imports of Inductor
def test_a_package_of_aotinductor(tmp_path: Path) -> None:
    """A network compiled to a package, which needs no Python class, returns the bits of torch's."""

    def scenario(impl: Implementation) -> Any:
        net, batch = make_net(impl.nn, "nested").eval(), make_batch("nested")
        program = export(net, (batch,), dynamic_shapes=({0: Dim("batch")},))
        path = torch._inductor.aoti_compile_and_package(
            program, package_path=str(tmp_path / f"{impl}.pt2")
        )
        runner = torch._inductor.aoti_load_package(path)
        names = sorted(runner.get_constant_fqns())
        return (
            runner(batch),
            runner(batch[:2]),
            names,
            runner.get_metadata().keys() >= {"AOTI_DEVICE_KEY"},
        )

    found = agree(scenario)

    torch.testing.assert_close(found[0], make_net(torch.nn, "nested").eval()(make_batch("nested")))
