"""Post-hoc EMA: combine snapshots of ``modkit.PostHocEMA`` into averages of other widths.

Training keeps a narrow and a wide power average, and saves a snapshot of each at intervals. Then
the average of nearly any width, at nearly any step, is a linear combination of snapshots (Karras et
al. 2024, section 3, https://arxiv.org/abs/2312.02696).

Example:
    >>> import torch
    >>> from modkit import PostHocEMA, posthoc
    >>> model = torch.nn.Linear(1, 1, bias=False)
    >>> folder = tmp_path / "snapshots"
    >>> averages = PostHocEMA(model, folder, snapshot_every=100)
    >>> for step in range(1, 1001):
    ...     weight = torch.nn.init.constant_(model.weight, step)
    ...     averages.update()
    >>> posthoc.reconstruct(folder, sigma_rel=0.15).copy_to(model)
    >>> round(model.weight.item())
    821
"""

from modkit._namespace import publish_all
from modkit.averaging.posthoc import *  # noqa: F403
from modkit.averaging.posthoc import __all__  # noqa: F401 - read by publish_all


publish_all(globals())
