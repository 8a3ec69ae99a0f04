"""Tests with the tools and libraries around modkit; importing it lets torchvision be imported."""

import importlib.util

import torch


# transformers and Lightning import torchvision where it is installed. One that was built for another
# accelerator than torch cannot load its C++ operators, which only detection needs; it imports all the
# same if their schemas are known. Processes that tests start need that too.
if importlib.util.find_spec("torchvision") is not None:
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        for name in ("nms", "qnms"):
            schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            torch.library.define(f"torchvision::{name}", schema)
        importlib.import_module("torchvision")
