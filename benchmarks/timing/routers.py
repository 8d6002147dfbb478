"""Count on a CPU how unevenly the routers of untrained mixtures of experts choose.

The expert that most tokens choose bounds the kernel that adds the gradients of experts' biases, because a warp adds
those of one expert one after the other (``trainatomy.operators.cost.indexing``, ``_repeats``).

python benchmarks/timing/routers.py    # a line for each network and seed, no GPU
"""

from __future__ import annotations

from math import sqrt
from statistics import median
from typing import Any

import torch
import transformers

VOCABULARY, BATCH, LENGTH, SEEDS = 30_000, 2, 400, (0, 1)
COMMON = {
    "hidden_size": 512,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": VOCABULARY,
}
NETWORKS: tuple[tuple[str, dict[str, int]], ...] = (
    ("MixtralForCausalLM", {"num_local_experts": 8, "num_experts_per_tok": 2}),
    ("OlmoeForCausalLM", {"num_experts": 16, "num_experts_per_tok": 4}),
    ("Qwen3MoeForCausalLM", {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 256}),
    (
        "Qwen2MoeForCausalLM",
        {
            "num_experts": 16,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 256,
            "shared_expert_intermediate_size": 256,
        },
    ),
    ("GraniteMoeForCausalLM", {"num_local_experts": 8, "num_experts_per_tok": 2}),
    ("GptOssForCausalLM", {"num_local_experts": 16, "num_experts_per_tok": 4, "head_dim": 64}),
    ("MiniMaxForCausalLM", {"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 64}),
)
"""Classes of transformers and what their configurations need beside ``COMMON``."""
MOST_EXPERTS = 128


class Choices(torch.overrides.TorchFunctionMode):
    """Notes for each ``topk`` over experts their number, and the share of choices that the fullest one gets."""

    def __init__(self) -> None:
        super().__init__()
        self.shares: list[tuple[int, float]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function, and count what it picked."""
        result = func(*args, **(kwargs or {}))
        if func in (torch.topk, torch.Tensor.topk) and args[0].shape[-1] <= MOST_EXPERTS:
            counts = torch.bincount(result[1].flatten(), minlength=args[0].shape[-1])
            self.shares.append((args[0].shape[-1], float(counts.max() / counts.sum())))
        return result


def main() -> None:
    """Print for each network the fullest expert's share of all choices, layer by layer, over 1 / sqrt(2 experts)."""
    ratios = []
    for name, further in NETWORKS:
        network = getattr(transformers, name)
        for seed in SEEDS:
            torch.manual_seed(seed)
            model = network(network.config_class(**COMMON, **further))
            ids = torch.randint(0, VOCABULARY, (BATCH, LENGTH))
            with torch.no_grad(), Choices() as choices:
                model(input_ids=ids)
            layers = [share * sqrt(2 * experts) for experts, share in choices.shares]
            ratios.append(median(layers))
            print(name, seed, choices.shares[0][0], *(f"{ratio:.2f}" for ratio in layers), f"median {ratios[-1]:.2f}")
    print(f"{len(ratios)} networks: {min(ratios):.2f} to {max(ratios):.2f}, median {median(ratios):.2f}")


if __name__ == "__main__":
    main()
