"""The commands of ``python -m modkit``: one file each, imported when it is called."""
