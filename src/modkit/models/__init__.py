"""Networks of published papers, built on :mod:`modkit.nn`."""

from modkit._namespace import publish_all as _publish_all
from modkit.models._networks import (
    DownSample,
    DynamicsNetwork,
    PredictionNetwork,
    RepresentationNetwork,
)
from modkit.models.efficientzero import EfficientZeroModel, EZNetworkOutput


__all__ = [
    "DownSample",
    "DynamicsNetwork",
    "EZNetworkOutput",
    "EfficientZeroModel",
    "PredictionNetwork",
    "RepresentationNetwork",
]

_publish_all(globals())
