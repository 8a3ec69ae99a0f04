"""The random trees' own class on modkit."""

from tests.helpers import MODKIT
from tests.property.nodes import define_node


Node = define_node(MODKIT, __name__)
