"""Networks of published papers, built on :mod:`modkit.nn`."""

from modkit._namespace import publish_all as _publish_all
from modkit.models._networks import DynamicsNetwork
from modkit.models.efficientzero import (
    EfficientZeroConfig,
    EfficientZeroModel,
    EZNetworkOutput,
)


__all__ = ["DynamicsNetwork", "EZNetworkOutput", "EfficientZeroConfig", "EfficientZeroModel"]

_publish_all(globals())
