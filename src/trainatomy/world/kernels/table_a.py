"""Which rule tells what an operator's kernel allocates: reductions, normalisation, indexing, losses, optimizers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainatomy.world.kernels import elementwise, embedding, indexing, loss, normalisation, optimizer, reduction

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
    "aten::max": reduction.extremum,
    "aten::min": reduction.extremum,
    "aten::argmax": reduction.EXTREMUM_WITH_INDEX,
    "aten::argmin": reduction.EXTREMUM_WITH_INDEX,
    "aten::any": reduction.LOGICAL,
    "aten::all": reduction.LOGICAL,
    "aten::native_layer_norm": normalisation.layer_norm,
    "aten::native_layer_norm_backward": normalisation.layer_norm_backward,
    "aten::_fused_rms_norm": normalisation.layer_norm,
    "aten::_fused_rms_norm_backward": normalisation.layer_norm_backward,
    "aten::native_group_norm": normalisation.group_norm,
    "aten::native_group_norm_backward": normalisation.group_norm_backward,
    "aten::native_batch_norm": normalisation.batch_norm,
    "aten::native_batch_norm_backward": normalisation.batch_norm,
    "aten::cudnn_batch_norm": normalisation.batch_norm,
    "aten::cudnn_batch_norm_backward": normalisation.batch_norm,
    "aten::embedding": embedding.embedding,
    "aten::embedding_dense_backward": embedding.embedding_dense_backward,
    "aten::index": indexing.index,
    "aten::index_put": indexing.index_put,
    "aten::index_put_": indexing.index_put,
    "aten::_index_put_impl_": indexing.index_put,
    "aten::sort": indexing.sort,
    "aten::topk": indexing.topk,
    "aten::cumsum": indexing.cumulative_sum,
    "aten::_softmax": loss.softmax,
    "aten::_log_softmax": loss.softmax,
    "aten::_softmax_backward_data": loss.softmax_backward,
    "aten::_log_softmax_backward_data": loss.log_softmax_backward,
    "aten::nll_loss_forward": loss.nll_loss,
    "aten::nll_loss_backward": loss.nll_loss,
    "aten::nll_loss2d_forward": loss.nll_loss,
    "aten::nll_loss2d_backward": loss.nll_loss,
    "aten::mse_loss": loss.elementwise_loss,
    "aten::smooth_l1_loss": loss.elementwise_loss,
    "aten::huber_loss": loss.huber_loss,
    "aten::binary_cross_entropy": loss.binary_cross_entropy,
    "aten::binary_cross_entropy_with_logits": loss.binary_cross_entropy_with_logits,
    "aten::native_dropout": elementwise.native_dropout,
    "aten::isinf": elementwise.isinf,
    "aten::roll": elementwise.roll,
    "aten::_foreach_norm": optimizer.foreach_norm,
    "aten::_foreach_max": optimizer.foreach_max,
}
