"""LightZero's networks, where LightZero is installed: `nox -s lightzero` does that."""

import importlib
import warnings
from types import SimpleNamespace


KINDS = {
    "lzero.model.common": ("DownSample", "PredictionNetwork", "RepresentationNetwork"),
    "lzero.model.efficientzero_model": ("DynamicsNetwork", "EfficientZeroModel"),
}


def lightzero_networks() -> SimpleNamespace:
    """Import the classes; what LightZero's own imports warn of is not our concern."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = {
            name: getattr(importlib.import_module(module), name)
            for module, names in KINDS.items()
            for name in names
        }
    return SimpleNamespace(**found)
