"""The random trees' own class on torch."""

from tests.helpers import TORCH
from tests.property.nodes import define_node


Node = define_node(TORCH, __name__)
