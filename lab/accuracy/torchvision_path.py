"""Import torchvision beside a CPU build of torch.

PyPI's torchvision is built for CUDA.  Beside a CPU build of torch its operators do not load, and its import fails with
``torchvision::nms does not exist``; transformers' imports fail with it where it is installed in the same environment.
``make accuracy`` therefore installs it into ``build/torchvision``, and rows that need it import it from there, after
the schemas of its operators have been declared.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).parents[2] / "build" / "torchvision"

_ROI = "float spatial_scale, SymInt pooled_height, SymInt pooled_width"
_SIZES = "SymInt batch_size, SymInt channels, SymInt height, SymInt width"
_STEPS = "SymInt stride_h, SymInt stride_w, SymInt pad_h, SymInt pad_w, SymInt dilation_h, SymInt dilation_w"
_DEFORM = f"{_STEPS}, SymInt groups, SymInt offset_groups, bool use_mask"
_FIVE = "(Tensor, Tensor, Tensor, Tensor, Tensor)"
SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    f"roi_align(Tensor input, Tensor rois, {_ROI}, int sampling_ratio, bool aligned) -> Tensor",
    f"_roi_align_backward(Tensor grad, Tensor rois, {_ROI}, {_SIZES}, int sampling_ratio, bool aligned) -> Tensor",
    f"roi_pool(Tensor input, Tensor rois, {_ROI}) -> (Tensor, Tensor)",
    f"_roi_pool_backward(Tensor grad, Tensor rois, Tensor argmax, {_ROI}, {_SIZES}) -> Tensor",
    f"ps_roi_align(Tensor input, Tensor rois, {_ROI}, int sampling_ratio) -> (Tensor, Tensor)",
    f"_ps_roi_align_backward(Tensor grad, Tensor rois, Tensor channel_mapping, {_ROI}, int sampling_ratio, {_SIZES})"
    " -> Tensor",
    f"ps_roi_pool(Tensor input, Tensor rois, {_ROI}) -> (Tensor, Tensor)",
    f"_ps_roi_pool_backward(Tensor grad, Tensor rois, Tensor channel_mapping, {_ROI}, {_SIZES}) -> Tensor",
    f"deform_conv2d(Tensor input, Tensor weight, Tensor offset, Tensor mask, Tensor bias, {_DEFORM}) -> Tensor",
    "_deform_conv2d_backward(Tensor grad, Tensor input, Tensor weight, Tensor offset, Tensor mask, Tensor bias, "
    f"{_DEFORM}) -> {_FIVE}",
)
"""Schemas of torchvision's operators (torchvision/csrc/ops, 0.24 to 0.29)."""

_declared: list[Any] = []
"""The library of declared schemas; it lasts as long as this list holds it."""


def models() -> Any:
    """Return the module ``torchvision.models``.

    Raises:
        ModuleNotFoundError: torchvision is neither installed nor in ``build/torchvision``.
    """
    if importlib.util.find_spec("torchvision") is None:
        sys.path.append(str(FOLDER))
    if torch.version.cuda is None and not _declared:
        library = torch.library.Library("torchvision", "FRAGMENT")
        for schema in SCHEMAS:
            library.define(schema)
        _declared.append(library)
    from torchvision import models as found

    return found
