"""bitsandbytes' kernels for quantised weights; ``simulator.bitsandbytes_kernels`` names them."""

from __future__ import annotations

from trainatomy.operators.operator import Operator
from trainatomy.operators.table.family import family, row

_PRODUCTS = family(
    Operator("", "contraction", why="matrix products", launch="library", reads="sources"),
    row("bitsandbytes::gemm_4bit bitsandbytes::gemv_4bit", cost="bitsandbytes:product_4bit", launch="quantised"),
    row("bitsandbytes::int8_linear_matmul", cost="bitsandbytes:product_8bit"),
)

_CONVERSIONS = family(
    Operator("", "elementwise", launch="library", cost="bitsandbytes:conversion", reads="sources"),
    row("bitsandbytes::quantize_blockwise", flop=2, why="magnitude and scaling; the search for the nearest is moves"),
    row("bitsandbytes::quantize_4bit", flop=2, why="magnitude and scaling; the search for the nearest is moves"),
    row("bitsandbytes::dequantize_4bit", flop=1, why="scaling", launch="quantised"),
    row("bitsandbytes::dequantize_blockwise", flop=1, why="scaling"),
    row("bitsandbytes::int8_vectorwise_quant", flop=2, why="magnitude and scaling"),
    row("bitsandbytes::int8_mm_dequant", flop=2, why="scaling by row and by column"),
)

QUANTISED_WEIGHTS = (*_PRODUCTS, *_CONVERSIONS)
