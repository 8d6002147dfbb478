"""Expert parallelism: ranks share the experts of a mixture, by transformers' own plan and code.

Every rank processes the same samples and all layers but the experts.  Up to transformers 5.18, router outputs for
experts of other ranks are masked, and the ranks' results are added up; later, each rank sends a part of the tokens to
the ranks of their experts.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from trainatomy.catalog.versions import transformers_has
from trainatomy.errors import WorkloadError
from trainatomy.libraries import version_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_KEY = "parallel.enable_expert_parallel"


def share_experts(model: Any, mesh: DeviceMesh) -> None:
    """Shard the experts of a model over the ranks of ``mesh``.

    Raises:
        WorkloadError: The model has no plan for it, the ranks cannot share the experts, or transformers is too old.
    """
    if not getattr(model, "_ep_plan", None):
        raise WorkloadError(
            f"{type(model).__name__} has no plan for expert parallelism (base_model_ep_plan); mixtures of experts such "
            "as Qwen3-MoE, Mixtral and GPT-OSS have one",
            key=_KEY,
        )
    apply = _apply_plan if hasattr(model, "_expand_parallel_plan") else _apply_in_place_of_tensor_parallelism
    try:
        apply(model, mesh)
    except ValueError as error:
        raise WorkloadError(str(error), key=_KEY) from None


def _apply_plan(model: Any, mesh: DeviceMesh) -> None:
    """Shard the experts as transformers 5.23 and later: tokens are sent to the ranks of their experts and back.

    All ranks have the same samples, of which each sends a part.
    """
    apply = import_module("transformers.distributed.expert_parallel").apply_expert_parallelism
    apply(model, mesh, mesh, model._expand_parallel_plan(dict(model._ep_plan)))


def _apply_in_place_of_tensor_parallelism(model: Any, mesh: DeviceMesh) -> None:
    """Shard the experts as transformers 5.17 and 5.18, whose configuration chooses the plan of tensor parallelism."""
    if not transformers_has("expert_plans_in_place_of_tensor_plans"):
        found = version_of("transformers")
        raise WorkloadError(
            f"expert parallelism needs transformers 5.17, 5.18, or 5.23 and later, found {found}", key=_KEY
        )
    config = import_module("transformers.distributed").DistributedConfig
    model.config.distributed_config = config(tp_size=mesh.size(), enable_expert_parallel=True)
    import_module("transformers.distributed.tensor_parallel").apply_tensor_parallelism(model, mesh)
