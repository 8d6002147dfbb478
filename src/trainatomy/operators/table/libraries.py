"""Operators of libraries: NCCL, bitsandbytes, Triton, cut-cross-entropy, torchvision.

Collectives, as the simulation writes them: ``nccl::<kind>``.

bitsandbytes' kernels for quantised weights; ``simulator.bitsandbytes_kernels`` names them.

Triton kernels, which ``simulator.triton`` and ``simulator.compiled`` write as operations.

cut-cross-entropy's kernels, which ``simulator.adapters.cut_cross_entropy`` writes.

torchvision's operators on boxes; ``simulator.torchvision_kernels`` runs some of them in parts.
"""

from __future__ import annotations

from trainatomy.operators.operator import Operator, family, row

_KINDS = "all_reduce all_gather reduce_scatter all_to_all broadcast reduce gather scatter send recv barrier"

COMMUNICATION = family(
    Operator(
        "",
        "communication",
        0,
        "a move between GPUs; the additions of a reduction belong to no model",
        launch="collective",
        cost="communication:collective",
    ),
    row(" ".join(f"nccl::{kind}" for kind in _KINDS.split())),
    row("peer::copy", cost="communication:peer_copy"),
)


_PRODUCTS = family(
    Operator("", "contraction", why="matrix products", launch="library", reads="sources"),
    row("bitsandbytes::gemm_4bit bitsandbytes::gemv_4bit", cost="libraries:product_4bit", launch="quantised"),
    row("bitsandbytes::int8_linear_matmul", cost="libraries:product_8bit"),
)

_CONVERSIONS = family(
    Operator("", "elementwise", launch="library", cost="libraries:conversion", reads="sources"),
    row("bitsandbytes::quantize_blockwise", flop=2, why="magnitude and scaling; the search for the nearest is moves"),
    row("bitsandbytes::quantize_4bit", flop=2, why="magnitude and scaling; the search for the nearest is moves"),
    row("bitsandbytes::dequantize_4bit", flop=1, why="scaling", launch="quantised"),
    row("bitsandbytes::dequantize_blockwise", flop=1, why="scaling"),
    row("bitsandbytes::int8_vectorwise_quant", flop=2, why="magnitude and scaling"),
    row("bitsandbytes::int8_mm_dequant", flop=2, why="scaling by row and by column"),
)

QUANTISED_WEIGHTS = (*_PRODUCTS, *_CONVERSIONS)


TRITON = family(
    Operator(
        "",
        "elementwise",
        None,
        "no formula: the arithmetic of a Triton kernel is its own",
        launch="library",
        cost="elementwise:moved_once",
    ),
    row("triton::kernel"),
    row("inductor::fused", launch="fused", cost="libraries:fused"),
    row("inductor::kernel", cost="libraries:fused"),
    row("inductor::tuning", cost="elementwise:moved_once"),
)


LOSSES = family(
    Operator("", "contraction", why="matrix products", launch="library", cost="libraries:fused_loss"),
    row("cut_cross_entropy::forward cut_cross_entropy::backward"),
)


VISION = family(
    Operator(
        "",
        "elementwise",
        None,
        "no formula: samples of an image, as many as its boxes are large",
        launch="library",
        cost="elementwise:moved_once",
    ),
    row("torchvision::roi_align torchvision::roi_pool", allocates="elementwise:pooled"),
    row("torchvision::ps_roi_align torchvision::ps_roi_pool", allocates="elementwise:pooled"),
    row("torchvision::_roi_align_backward", allocates="elementwise:scattered"),
    row("torchvision::_roi_pool_backward", allocates="elementwise:scattered_by_number"),
    row("torchvision::_ps_roi_align_backward torchvision::_ps_roi_pool_backward", allocates="elementwise:pooled"),
    row("torchvision::deformable_im2col torchvision::deformable_col2im torchvision::deformable_col2im_coord"),
    row("torchvision::nms", why="no formula: comparisons of boxes"),
)
