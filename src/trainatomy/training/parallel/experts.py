"""Expert parallelism: ranks share the experts of a mixture, by transformers' own plan and code.

Every rank processes the same samples and all layers but the experts.  Router outputs for experts of other ranks are
masked, and the ranks' results are added up.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from trainatomy.errors import WorkloadError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_KEY = "parallel.enable_expert_parallel"


def share_experts(model: Any, mesh: DeviceMesh) -> None:
    """Shard the experts of a model over the ranks of ``mesh``.

    Raises:
        WorkloadError: The model has no plan for it, the ranks cannot share the experts, or transformers is too old.
    """
    try:
        config = import_module("transformers.distributed").DistributedConfig
        apply = import_module("transformers.distributed.tensor_parallel").apply_tensor_parallelism
    except (ImportError, AttributeError):
        raise WorkloadError("expert parallelism needs transformers 5.17 or later", key=_KEY) from None
    if not getattr(model, "_ep_plan", None):
        raise WorkloadError(
            f"{type(model).__name__} has no plan for expert parallelism (base_model_ep_plan); mixtures of experts such "
            "as Qwen3-MoE, Mixtral and GPT-OSS have one",
            key=_KEY,
        )
    model.config.distributed_config = config(tp_size=mesh.size(), enable_expert_parallel=True)
    try:
        apply(model, mesh)
    except ValueError as error:
        raise WorkloadError(str(error), key=_KEY) from None
