"""Optimizers and gradient scaling; other ``_foreach_`` forms follow from the plain rows."""

from __future__ import annotations

from trainatomy.operators.operator import Operator
from trainatomy.operators.table.family import family, row

_ADAM = "decay 1, first moment 3, second moment 4, root and its correction 3, step 3 (torch.optim.AdamW)"
_ADAGRAD = "square and sum 2, root and its guard 2, step 3 (torch.optim.Adagrad)"

# Gradients are written only where a gradient scaler hands over its scale.
OPTIMIZERS = family(
    Operator("", "elementwise", launch="list", cost="lists:fused_optimizer", read_only_list=1),
    row("_fused_adamw_ _fused_adam_", flop=14, why=_ADAM),
    row("_fused_sgd_", flop=4, why="momentum 2, step 2 (torch.optim.SGD)", meta="meta:in_place"),
    row("_fused_adagrad_", flop=7, why=_ADAGRAD, meta="meta:in_place"),
)

# multi_tensor_adam: FusedAdam; adam_update: DeepSpeedCPUAdam, on the host.
DEEPSPEED = family(
    Operator("", "elementwise", launch="list", cost="lists:deepspeed_adam"),
    row("deepspeed::multi_tensor_adam deepspeed::adam_update", flop=14, why=_ADAM),
)

FOREACH = family(
    Operator("", launch="list", cost="lists:foreach"),
    row("_foreach_copy", group="elementwise", flop=0, why="a move", reads="sources"),
    row("_foreach_max", group="normalisation", flop=0, why="comparisons", allocates="optimizer:foreach_max"),
    row("_foreach_norm", group="normalisation", flop=2, why="square and sum", allocates="optimizer:foreach_norm"),
)

UNSCALING = family(
    Operator("", "elementwise", 1, "unscaling of gradients"),
    row("_amp_foreach_non_finite_check_and_unscale", launch="list", cost="lists:unscale"),
    row("_amp_update_scale", cost="elementwise:pointwise"),
)

# ``sync_gpu`` after each parameter: bitsandbytes/optim/optimizer.py, 0.50.
QUANTISED_OPTIMIZERS = family(
    Operator(
        "",
        "elementwise",
        None,
        "no formula: the arithmetic of quantised states is the library's own",
        launch="library",
        sync="always",
    ),
    row("bitsandbytes::optimizer_update_32bit", cost="bitsandbytes:update_32bit"),
    row("bitsandbytes::optimizer_update_8bit_blockwise", cost="bitsandbytes:update_8bit"),
)

LISTS = (*OPTIMIZERS, *DEEPSPEED, *FOREACH, *UNSCALING, *QUANTISED_OPTIMIZERS)
