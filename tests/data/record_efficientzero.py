"""Write efficientzero.pt: what LightZero's networks compute, for tests that run without LightZero.

    nox -s lightzero -- --record

The file holds key names, fingerprints of all bits and a few elements of each tensor, for the cases of
``tests/efficientzero.py``; and one network with all of its weights, after a step of training.
"""

import os
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch


ROOT = Path(__file__).resolve().parents[2]
FILE = Path(__file__).with_name("efficientzero.pt")
sys.path.insert(0, str(ROOT))

from tests.efficientzero import CASES, kernels, record_of, run, scramble  # noqa: E402
from tests.integration.lightzero.networks import lightzero_networks  # noqa: E402


def trained(networks: Any) -> dict[str, Any]:
    """Train a small network for a step; return its state, and what it computes then."""
    case = CASES["BN"]
    network = case.build(networks)
    scramble(network)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    run(case, network, "__call__", torch.float32, training=True)
    optimizer.step()
    optimizer.zero_grad()
    state = {key: tensor.clone() for key, tensor in network.state_dict().items()}
    network.eval()
    inputs = case.inputs("__call__", torch.float32)
    with torch.no_grad():
        latent, hidden, prefix = network(*inputs)
    return {"state": state, "inputs": inputs, "outputs": (latent, *hidden, prefix)}


def main() -> None:
    """Record everything anew."""
    networks = lightzero_networks()
    content = {
        "versions": {name: version(name) for name in ("LightZero", "DI-engine", "torch")},
        "kernels": kernels(),
        "cases": {name: record_of(case, networks) for name, case in CASES.items()},
        "trained": trained(networks),
    }
    with tempfile.NamedTemporaryFile(dir=FILE.parent, delete=False) as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())
    Path(file.name).replace(FILE)
    print(f"{FILE.name}: {len(content['cases'])} cases, {FILE.stat().st_size:,} bytes")  # noqa: T201


if __name__ == "__main__":
    main()
