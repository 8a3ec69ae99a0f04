"""Networks of published papers, built on :mod:`modkit.nn`."""

from modkit.models.efficientzero import (
    DownSample as DownSample,
    DynamicsNetwork as DynamicsNetwork,
    EfficientZeroModel as EfficientZeroModel,
    EZNetworkOutput as EZNetworkOutput,
    PredictionNetwork as PredictionNetwork,
    RepresentationNetwork as RepresentationNetwork,
)
