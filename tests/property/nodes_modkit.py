"""The random trees' own classes on modkit."""

from tests.helpers import MODKIT
from tests.property.classes import define_classes


globals().update(define_classes(MODKIT, __name__))
