"""Networks of published papers, built on :mod:`modkit.nn`."""

from modkit._namespace import publish_all as _publish_all
from modkit.models.efficientzero import (
    DownSample,
    DynamicsNetwork,
    EfficientZeroModel,
    EZNetworkOutput,
    PredictionNetwork,
    RepresentationNetwork,
)


__all__ = [
    "DownSample",
    "DynamicsNetwork",
    "EZNetworkOutput",
    "EfficientZeroModel",
    "PredictionNetwork",
    "RepresentationNetwork",
]

_publish_all(globals())
