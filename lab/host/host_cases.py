"""Draw random trainings for ``host_compare.py``, and describe each as a workload and as a real training.

Left out is what the CPU does in another way than a GPU, as the bill is one of trainings on GPUs: attention with
dropout, whose probabilities the CPU keeps, and Adafactor, whose temporaries are larger there.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, Literal

MIB = 1 << 20


@dataclass(frozen=True)
class Case:
    """A training on the CPU, or one whose GPU is a stand-in.

    Attributes:
        place: ``cpu``: everything is real, and what would be on a GPU is in host memory too.  ``away``: the weights
            leave the host after they were loaded, as they do for a GPU, and the steps, the evaluation's outputs and the
            copies that are saved are those of a training on a GPU.
        model: Class of the model.
        config: Settings of its configuration.
        stored: Dtype of its weights on disk; they are loaded in float32.
        length: Tokens of a sample; 0 for images.
        batch: Samples of a batch.
        steps: Optimizer steps.
        optim: The optimizer.
        workers: DataLoader workers.
        prefetch: Batches that each makes ahead.
        objects: Mebibytes of a data set of Python objects; 0: an array that is made as needed.
        evaluates: Samples of an evaluation; 0: none.
        gathers: Whether its logits are gathered.
        saves: Whether a checkpoint is saved.
    """

    place: Literal["cpu", "away"]
    model: str
    config: dict[str, Any]
    stored: str
    length: int
    batch: int
    steps: int
    optim: str
    workers: int
    prefetch: int
    objects: int
    evaluates: int
    gathers: bool
    saves: bool

    def workload(self, folder: str) -> dict[str, Any]:
        """Return the training as the mapping of a workload file; its weights are in ``folder``."""
        data: dict[str, Any] = {"sequence_length": self.length} if self.length else {}
        if self.evaluates:
            data |= {"eval_samples": self.evaluates, "compute_metrics": self.gathers}
        return {
            "model": {"id": folder, "class": self.model, "dtype": "float32"},
            "data": data,
            "train": {
                "per_device_train_batch_size": self.batch,
                "per_device_eval_batch_size": self.batch,
                "optim": self.optim,
                "dataloader_num_workers": self.workers,
                "dataloader_prefetch_factor": self.prefetch,
                "eval_strategy": "steps" if self.evaluates else "no",
                "save_strategy": "steps" if self.saves else "no",
                "save_total_limit": 1,
            },
        }


_TEXT = ("GPT2LMHeadModel", "BertForSequenceClassification", "LlamaForCausalLM")


def draw(count: int, seed: int) -> list[Case]:
    """Return random cases; the same for the same seed."""
    chance = random.Random(seed)
    return [_case(chance) for _ in range(count)]


def _case(chance: random.Random) -> Case:
    model = chance.choice((*_TEXT, "ViTForImageClassification"))
    config = _config(model, chance)
    is_text = model in _TEXT
    length = chance.choice((64, 128, 256)) if is_text else 0
    words = config.get("vocab_size", 2) if model != "BertForSequenceClassification" else 2
    batch = chance.choice((1, 2, 4, 8))
    evaluates = chance.choice((0, 0, 4, 8)) * batch
    gathers = chance.random() < 0.7 and evaluates * max(length, 1) * words * 4 < 1500 * MIB
    return Case(
        place=chance.choice(("cpu", "away")),
        model=model,
        config=config,
        stored=chance.choice(("float32", "float32", "bfloat16")),
        length=length,
        batch=batch,
        steps=chance.choice((4, 6)),
        optim=chance.choice(("adamw_torch_fused", "sgd")),
        workers=chance.choice((0, 1, 2, 4)),
        prefetch=chance.choice((1, 2, 4)),
        objects=chance.choice((0, 0, 100, 300)),
        evaluates=evaluates,
        gathers=gathers,
        saves=chance.random() < 0.6,
    )


def _config(model: str, chance: random.Random) -> dict[str, Any]:
    """Return sizes, without dropout: attention on the CPU would keep probabilities that no GPU keeps."""
    width, layers = chance.choice((256, 512, 768, 1024)), chance.choice((2, 4, 8, 12))
    heads = width // 64
    if model == "GPT2LMHeadModel":
        return {
            "n_embd": width,
            "n_layer": layers,
            "n_head": heads,
            "vocab_size": chance.choice((5000, 20000, 50257)),
            "attn_pdrop": 0.0,
        }
    config: dict[str, Any] = {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": 4 * width,
    }
    if model == "ViTForImageClassification":
        config |= {"attention_probs_dropout_prob": 0.0}
        return config | {"image_size": chance.choice((96, 160, 224)), "patch_size": 16}
    if model == "LlamaForCausalLM":
        config |= {"num_key_value_heads": heads}
    else:
        config |= {"attention_probs_dropout_prob": 0.0}
    return config | {"vocab_size": chance.choice((5000, 20000, 32000))}
