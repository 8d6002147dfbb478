"""torchvision's operators on boxes; ``simulator.torchvision_kernels`` runs some of them in parts."""

from __future__ import annotations

from trainatomy.operators.operator import Operator
from trainatomy.operators.table.family import family, row

VISION = family(
    Operator(
        "",
        "elementwise",
        None,
        "no formula: samples of an image, as many as its boxes are large",
        launch="library",
        cost="elementwise:moved_once",
    ),
    row("torchvision::roi_align torchvision::roi_pool", allocates="regions:pooled"),
    row("torchvision::ps_roi_align torchvision::ps_roi_pool", allocates="regions:pooled"),
    row("torchvision::_roi_align_backward", allocates="regions:scattered"),
    row("torchvision::_roi_pool_backward", allocates="regions:scattered_by_number"),
    row("torchvision::_ps_roi_align_backward torchvision::_ps_roi_pool_backward", allocates="regions:pooled"),
    row("torchvision::deformable_im2col torchvision::deformable_col2im torchvision::deformable_col2im_coord"),
    row("torchvision::nms", why="no formula: comparisons of boxes"),
)
