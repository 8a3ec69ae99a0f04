"""A second name of ``torch.nn.attention.experimental``, which has no public names so far."""

from typing import TYPE_CHECKING

from modkit.nn.modules._newer import upstream_names


if not TYPE_CHECKING:
    __getattr__ = upstream_names(__name__)
