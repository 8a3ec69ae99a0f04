"""The averages of other libraries beside modkit's."""
