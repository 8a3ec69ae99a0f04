"""The random trees' own classes on torch."""

from tests.helpers import TORCH
from tests.property.classes import define_classes


globals().update(define_classes(TORCH, __name__))
