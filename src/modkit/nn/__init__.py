"""Drop-in for ``torch.nn``: every name is torch's own object, except ``Module``.

Submodules are torch's too, however they are imported: ``modkit.nn.functional is
torch.nn.functional``. Reading or assigning any other attribute of ``modkit.nn``,
``modkit.nn.modules`` and ``modkit.nn.modules.module`` reads or assigns that of torch's module.
"""

from typing import TYPE_CHECKING


if TYPE_CHECKING:
    # To type checkers the two namespaces are one, so annotations of either name agree.
    from torch.nn import *  # noqa: F403  # pyright: ignore[reportWildcardImportFromLibrary]
else:
    from modkit._namespace import mirror, publish
    from modkit.nn.module import Module

    publish(__name__, Module)

    mirror(
        "modkit.nn",
        {
            name: {"Module": Module}
            for name in ("modkit.nn", "modkit.nn.modules", "modkit.nn.modules.module")
        },
    )
