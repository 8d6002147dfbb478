"""Draw random trainings for ``host_compare.py``, and describe each as a workload and as a real training.

Left out of trainings on the CPU is what it does in another way than a GPU, as the bill is one of trainings on GPUs:
attention with dropout, whose probabilities the CPU keeps, and Adafactor, whose temporaries are larger there.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, Literal

MIB = 1 << 20

Place = Literal["cpu", "away", "cuda"]
Offload = Literal["", "save_on_cpu", "checkpoints", "shards"]


@dataclass(frozen=True)
class Case:
    """A training on the CPU, on GPUs, or one whose GPU is a stand-in.

    Attributes:
        place: ``cpu``: everything is real, and what would be on a GPU is in host memory too.  ``away``: the weights
            leave the host after they were loaded, as they do for a GPU, and the steps, the evaluation's outputs and the
            copies that are saved are those of a training on a GPU.  ``cuda``: everything is real, on GPUs.
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
        gpus: GPUs, one process for each.
        pins: Whether batches are pinned.
        offload: What is kept in host memory: ``save_on_cpu`` (in a plain loop), the inputs of gradient checkpoints, or
            FSDP2's shards.
    """

    place: Place
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
    gpus: int = 1
    pins: bool = False
    offload: Offload = ""

    def workload(self, folder: str) -> dict[str, Any]:
        """Return the training as the mapping of a workload file; its weights are in ``folder``."""
        data: dict[str, Any] = {"sequence_length": self.length} if self.length else {}
        if self.evaluates:
            data |= {"eval_samples": self.evaluates, "compute_metrics": self.gathers}
        train: dict[str, Any] = {
            "per_device_train_batch_size": self.batch,
            "optim": self.optim,
            "dataloader_num_workers": self.workers,
            "dataloader_prefetch_factor": self.prefetch,
            **self.memory_arguments(),
        }
        if self.offload != "save_on_cpu":
            train |= {
                "per_device_eval_batch_size": self.batch,
                "eval_strategy": "steps" if self.evaluates else "no",
                "save_strategy": "steps" if self.saves else "no",
                "save_total_limit": 1,
            }
        plain = {"loop": "pytorch", "activation_offloading": "pinned"} if self.offload == "save_on_cpu" else {}
        return {
            **plain,
            "model": {"id": folder, "class": self.model, "dtype": "float32"},
            "data": data,
            "parallel": {"gpus": self.gpus},
            "train": train,
        }

    def memory_arguments(self) -> dict[str, Any]:
        """Return the arguments of the Trainer that place tensors, and those that a training on a GPU has."""
        found: dict[str, Any] = {"bf16": True, "dataloader_pin_memory": self.pins} if self.place == "cuda" else {}
        if self.offload == "checkpoints":
            found |= {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"offload": True}}
        if self.offload == "shards":
            found |= {"fsdp": "full_shard", "fsdp_config": {"version": 2, "cpu_offload": True}}
        return found


_TEXT = ("GPT2LMHeadModel", "BertForSequenceClassification", "LlamaForCausalLM")


def draw(count: int, seed: int, gpus: int = 0) -> list[Case]:
    """Return random cases, the same for the same seed: without GPUs, or of so many."""
    chance = random.Random(seed)
    return [_on_gpus(chance, gpus) if gpus else _case(chance) for _ in range(count)]


def _on_gpus(chance: random.Random, gpus: int) -> Case:
    """Return a training of a model of 85 to 550 million parameters."""
    offloads: tuple[Offload, ...] = ("", "", "save_on_cpu", "checkpoints") if gpus == 1 else ("", "shards", "shards")
    offload = chance.choice(offloads)
    # accelerate 1.15 ends with an assertion for BERT and ViT, whose embeddings it wraps twice
    language_models = ("GPT2LMHeadModel", "LlamaForCausalLM")
    model = chance.choice(language_models if offload == "shards" else (*_TEXT, "ViTForImageClassification"))
    width, layers = chance.choice(((768, 12), (1024, 12), (1024, 24), (1280, 12), (1280, 24)))
    config = _sizes(model, width, layers, chance.choice((20000, 32000, 50257)))
    is_plain = offload == "save_on_cpu"
    length = chance.choice((128, 256, 512)) if model in _TEXT else 0
    batch = chance.choice((2, 4, 8)) if not is_plain else chance.choice((1, 2))
    evaluates = 0 if is_plain else chance.choice((0, 0, 4, 8)) * batch
    words = config.get("vocab_size", 2) if model != "BertForSequenceClassification" else 2
    gathers = chance.random() < 0.5 and evaluates * gpus * max(length, 1) * words * 4 < 2000 * MIB
    return Case(
        place="cuda",
        model=model,
        config=config | ({"image_size": 224, "patch_size": 16} if model == "ViTForImageClassification" else {}),
        stored=chance.choice(("float32", "bfloat16")),
        length=length,
        batch=batch,
        steps=4,
        optim=chance.choice(("adamw_torch_fused", "sgd")),
        workers=chance.choice((0, 1, 2, 4)),
        prefetch=chance.choice((2, 4)),
        objects=chance.choice((0, 0, 300)),
        evaluates=evaluates,
        gathers=gathers,
        saves=not is_plain and chance.random() < 0.5,
        gpus=gpus,
        pins=chance.random() < 0.7,
        offload=offload,
    )


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
    """Return sizes, without dropout in attention: on the CPU it would keep probabilities that no GPU keeps."""
    width, layers = chance.choice((256, 512, 768, 1024)), chance.choice((2, 4, 8, 12))
    if model == "ViTForImageClassification":
        config = _sizes(model, width, layers, 0) | {"attention_probs_dropout_prob": 0.0}
        return config | {"image_size": chance.choice((96, 160, 224)), "patch_size": 16}
    words = chance.choice((5000, 20000, 50257 if model == "GPT2LMHeadModel" else 32000))
    dropout = {
        "GPT2LMHeadModel": {"attn_pdrop": 0.0},
        "BertForSequenceClassification": {"attention_probs_dropout_prob": 0.0},
    }
    return _sizes(model, width, layers, words) | dropout.get(model, {})


def _sizes(model: str, width: int, layers: int, words: int) -> dict[str, Any]:
    """Return the configuration of a model with heads of 64."""
    heads = width // 64
    if model == "GPT2LMHeadModel":
        return {"n_embd": width, "n_layer": layers, "n_head": heads, "vocab_size": words}
    config: dict[str, Any] = {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": 4 * width,
    }
    if model == "LlamaForCausalLM":
        config |= {"num_key_value_heads": heads}
    return config if model == "ViTForImageClassification" else config | {"vocab_size": words}
