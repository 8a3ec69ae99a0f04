"""The loading of state dicts in other libraries beside modkit's."""
