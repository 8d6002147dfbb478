"""Time the phases of small trainings in pairs, which differ only in their number of layers.

python benchmarks/timing/host_pairs.py --out FILE.jsonl [--time-limit 92]   # on a GPU that nothing else uses

Adapters, quantised weights, checkpoints, TRL's trainers, accumulation, evaluation and generation: what a pair's smaller
training takes is mostly what its loop takes, and the difference is what layers take.  The probe's part on each thread
is read three times after each step.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "accuracy"))

import host_drawn  # noqa: E402
from host_cases import NF4, decoder, encoder  # noqa: E402

SEED = "34 mid"
LORA = {"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
ADAPTED = {"dtype": "bfloat16", "lora": LORA}
INT8, FOUR_BITS = ({**ADAPTED, "quantization": weights} for weights in ({"load_in_8bit": True}, NF4))
CHECKPOINTS, NONE = {"gradient_checkpointing": True}, {"gradient_checkpointing": False}
REENTRANT = {**CHECKPOINTS, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
BF16, EVALUATED = {"bf16": True}, {"eval_strategy": "steps", "per_device_eval_batch_size": 4}
TOKENS = {"max_new_tokens": 12}
SAMPLED = {**TOKENS, "do_sample": True, "top_k": 40, "top_p": 0.9}
DEPTHS = (2, 9)
LAYERS = frozenset({"num_hidden_layers", "n_layer", "num_layers", "n_layers"})
READINGS = 3
KINDS: dict[str, tuple[Any, Mapping[str, Any], str | None, Mapping[str, Any], Mapping[str, Any]]] = {
    "plain": (decoder, {}, None, BF16, {}),
    "int8.ckpt.pytorch": (decoder, INT8, "pytorch", {**BF16, **CHECKPOINTS}, {}),
    "sft.lora.ckpt": (decoder, ADAPTED, "sft", CHECKPOINTS, {}),
    "greedy": (decoder, {"dtype": "bfloat16"}, None, {}, {"generation": TOKENS}),
    "evaluate": (decoder, {}, None, {**BF16, **EVALUATED}, {"eval_samples": 32}),
    "kto": (decoder, {}, "kto", NONE, {}),
    "pytorch": (decoder, {}, "pytorch", BF16, {}),
    "lora": (decoder, {"lora": LORA}, None, BF16, {}),
    "ckpt": (decoder, {}, None, {**BF16, **CHECKPOINTS}, {}),
    "int8": (decoder, INT8, None, {**BF16, **NONE}, {}),
    "nf4.ckpt": (decoder, FOUR_BITS, None, {**BF16, **CHECKPOINTS}, {}),
    "dpo": (decoder, {}, "dpo", NONE, {}),
    "sample": (decoder, {"dtype": "float32"}, None, {}, {"generation": SAMPLED}),
    "plain.fp32": (encoder, {}, None, {}, {}),
    "lora.ckpt": (decoder, {"lora": LORA}, None, {**BF16, **CHECKPOINTS}, {}),
    "kto.lora.ckpt": (decoder, ADAPTED, "kto", CHECKPOINTS, {}),
    "sft": (decoder, {}, "sft", NONE, {}),
    "beams": (decoder, {"dtype": "bfloat16"}, None, {}, {"generation": {**TOKENS, "num_beams": 3}}),
    "accum": (decoder, {}, None, {**BF16, "gradient_accumulation_steps": 4}, {}),
    "ckpt.reentrant.pytorch": (decoder, {}, "pytorch", {**BF16, **REENTRANT}, {}),
    "evaluate.metrics": (encoder, {}, None, EVALUATED, {"eval_samples": 32, "compute_metrics": True}),
    "nf4": (decoder, FOUR_BITS, None, {**BF16, **NONE}, {}),
    "int8.ckpt": (decoder, INT8, None, {**BF16, **CHECKPOINTS}, {}),
    "dpo.lora.ckpt": (decoder, ADAPTED, "dpo", CHECKPOINTS, {}),
    "sft.ckpt": (decoder, {}, "sft", CHECKPOINTS, {}),
    "lora.pytorch": (decoder, {"lora": LORA}, "pytorch", BF16, {}),
    "pytorch.fp32": (encoder, {}, "pytorch", {}, {}),
}
"""How to draw a model, what else it has, its loop, its settings, and its data or generation."""


class Watch(host_drawn.Watch):
    """Reads both parts of the probe after each step, and the first, cold pass of the main thread."""

    def __init__(self, *, evaluates: bool) -> None:
        super().__init__(evaluates=evaluates)
        self.readings: list[dict[str, list[float]]] = []

    def step_end(self, step: int) -> None:
        import torch

        from trainatomy.measurement.device import host_probe

        self._note("step_end")
        self.steps.append(self._now)
        found: dict[str, list[float]] = {"cold": [], "main": [], "visit": []}
        with torch.inference_mode(False), torch.enable_grad(), torch.autocast("cpu", enabled=False):
            for _ in range(READINGS):
                for part in ("cold", "main"):
                    began = time.perf_counter()
                    host_probe._work()
                    found[part].append(round(1e6 * (time.perf_counter() - began), 1))
                found["visit"].append(round(1e6 * host_probe._visit()[0], 1))
        self.probes.append(1e-6 * (found["main"][0] + found["visit"][0]))
        self.readings.append(found)
        self._now = [("after_step", time.perf_counter())]


def cases() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the drawn trainings of both depths."""
    for name, (make, further, loop, train, more) in KINDS.items():
        draw = Random(f"{SEED} {name}")
        model = make(draw)
        while "GPTNeoF" in model["class"] or ("ckpt" in name and "MPNet" in model["class"]):
            model = make(draw)  # the first has a list of layers, the second no checkpoints
        data: dict[str, Any] = {} if "Image" in model["class"] else {"sequence_length": draw.choice((32, 64))}
        data |= {"prompt_length": data["sequence_length"] // 2} if loop in ("dpo", "kto") else {}
        data |= {key: value for key, value in more.items() if key != "generation"}
        case: dict[str, Any] = {"data": data, "train": {"per_device_train_batch_size": 2, **train}}
        case |= {"loop": loop} if loop else {}
        case |= {"mode": "generation", "generation": more["generation"]} if "generation" in more else {}
        for depth in DEPTHS:
            config = {key: depth if key in LAYERS else value for key, value in model["config"].items()}
            yield f"pairs.{name}.{depth}", {**case, "model": {**model, **further, "config": config}}


if __name__ == "__main__":
    sys.exit(host_drawn.measure_in_fork(__doc__, cases(), partial(host_drawn.measured, watching=Watch), 92))
