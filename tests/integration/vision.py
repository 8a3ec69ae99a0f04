"""Importing torchvision where it does not fit torch."""

from typing import Any

import pytest
import torch


def import_torchvision() -> Any:
    """Import torchvision, or skip.

    One that was built for another accelerator than torch cannot load its C++ operators, which only
    detection needs. It imports all the same if their schemas are known.
    """
    reason = "needs torchvision: nox -s ecosystem installs it"
    try:
        return pytest.importorskip("torchvision", reason=reason)
    except RuntimeError:
        for name in ("nms", "qnms"):
            schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            torch.library.define(f"torchvision::{name}", schema)
        return pytest.importorskip("torchvision", reason=reason)
