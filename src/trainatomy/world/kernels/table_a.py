"""Which rule tells what an operator's kernel allocates: reductions, normalisation, indexing, losses, optimizers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainatomy.world.kernels import indexing, normalisation, optimizer, reduction

if TYPE_CHECKING:
    from trainatomy.world.kernels.plan import Rule

RULES_A: dict[str, Rule] = {
    "aten::sum": reduction.SUM,
    "aten::mean": reduction.SUM,
    "aten::nansum": reduction.PRODUCT,
    "aten::prod": reduction.PRODUCT,
    "aten::norm": reduction.NORM,
    "aten::linalg_vector_norm": reduction.NORM,
    "aten::std": reduction.MOMENTS,
    "aten::var": reduction.MOMENTS,
    "aten::std_mean": reduction.MOMENTS,
    "aten::var_mean": reduction.MOMENTS,
    "aten::amax": reduction.EXTREMUM,
    "aten::amin": reduction.EXTREMUM,
    "aten::argmax": reduction.EXTREMUM_WITH_INDEX,
    "aten::argmin": reduction.EXTREMUM_WITH_INDEX,
    "aten::any": reduction.LOGICAL,
    "aten::all": reduction.LOGICAL,
    "aten::native_layer_norm": normalisation.layer_norm,
    "aten::native_layer_norm_backward": normalisation.layer_norm_backward,
    "aten::_fused_rms_norm": normalisation.layer_norm,
    "aten::_fused_rms_norm_backward": normalisation.layer_norm_backward,
    "aten::embedding_dense_backward": indexing.embedding_dense_backward,
    "aten::_foreach_norm": optimizer.foreach_norm,
    "aten::_foreach_max": optimizer.foreach_norm,
}
