"""Declared migrations: how state dicts of older versions of a class become those of newer ones."""

from modkit._namespace import publish_all
from modkit.migrations.declarations import declare
from modkit.migrations.files import migrate_file
from modkit.migrations.state_dicts import migrate, plan
from modkit.migrations.steps import add, convert, drop, merge, rename, split


__all__ = [
    "add",
    "convert",
    "declare",
    "drop",
    "merge",
    "migrate",
    "migrate_file",
    "plan",
    "rename",
    "split",
]


publish_all(globals())
