"""A pretend executor: predictions by a formula instead of a simulation, so that whole spaces can be executed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from trainatomy.errors import SimulationError, TrainatomyError
from trainatomy.results.memory import Components, TimelinePoint
from trainatomy.results.prediction import Prediction
from trainatomy.workload.schema import Workload

GIB = 2**30
TINY = {
    "model": {
        "class": "GPT2LMHeadModel",
        "config": {"model_type": "gpt2", "n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 128},
        "dtype": "float32",
    },
    "data": {"sequence_length": 256},
    "gpu": "rtx-3090",
}


@dataclass
class Model:
    """How memory and time of a pretended training follow from its settings; time in seconds, memory in GiB."""

    static: float = 2.0
    sample: float = 0.5
    saved: float = 0.7
    recompute: float = 0.3
    launch: float = 0.004
    arithmetic: float = 0.01
    update: float = 0.02
    implementation: float = 0.1
    eager: float = 0.2
    noise: float = 0.0
    eight_bit: float = 0.9

    def step(self, workload: Workload) -> tuple[float, float, float, float]:
        """Return static memory, memory of the batch, cache, and seconds."""
        train = workload.train
        share = 1 / train.gradient_checkpointing_every if train.gradient_checkpointing else 0.0
        batch, micro_steps = train.per_device_train_batch_size, train.gradient_accumulation_steps
        length = (workload.data.sequence_length or 256) / 256
        eager = workload.model.attn_implementation == "eager"
        memory = batch * length * self.sample * (1 - self.saved * share) * (1 + 0.1 * eager)
        compute = (self.launch + self.arithmetic * batch * length) * (1 + self.recompute * share)
        compute *= (1 + self.eager * eager) * (1 + self.noise * math.sin(7 * batch + 3 * share))
        update = self.update * (1 if train.optim == "adamw_torch_fused" else 1 + self.implementation)
        static = self.static * (self.eight_bit if "8bit" in train.optim else 1) * (0.5 if workload.model.lora else 1)
        cache = 0.1 * memory * ("expandable" not in workload.allocator)
        return static, memory, cache, micro_steps * compute + update

    def held(self, workload: Workload) -> tuple[list[tuple[str, dict[str, float]]], float, float]:
        """Return the phases with what each holds at its peak, the cache, and seconds."""
        static, memory, cache, seconds = self.step(workload)
        return [("backward", {"weights": static, "activations": memory})], cache, seconds


STATES = {"adamw_torch_fused": 2.0, "adamw_torch": 2.0, "adamw_bnb_8bit": 0.5, "adafactor": 0.02}
"""Optimizer states as multiples of what is trained; those of others take none."""


@dataclass
class Phased(Model):
    """A training whose peak may be in forward, at the end of backward, in the optimizer or in an evaluation.

    Sizes are in GiB: of the weights, of a sample's activations and logits, of what an evaluation gathers.  ``adapted``
    is the share of activations that a training of adapters saves, ``kept`` the share that checkpointing keeps of the
    activations of the whole training.
    """

    weights: float = 4.0
    logits: float = 0.2
    adapted: float = 0.6
    kept: float = 0.1
    gathered: float = 0.0
    foreach: float = 0.3

    def held(self, workload: Workload) -> tuple[list[tuple[str, dict[str, float]]], float, float]:
        train, model = workload.train, workload.model
        bits = 0.28 if model.quantization and model.quantization.load_in_4bit else 0.55 if model.quantization else 1.0
        trained = self.weights * (0.01 if model.lora else 1.0)
        always = {"weights": self.weights * bits, "optimizer_states": trained * STATES.get(train.optim, 0.0)}
        tokens = train.per_device_train_batch_size * (workload.data.sequence_length or 256) / 256
        share = 1 / train.gradient_checkpointing_every if train.gradient_checkpointing else 0.0
        saved = (1 - share) * (self.adapted if model.lora else 1.0) + share * self.kept
        saved *= self.sample * tokens * (1 + self.eager * (model.attn_implementation == "eager"))
        phases = [
            ("forward", {**always, "activations": saved, "temporary": self.logits * tokens}),
            ("backward", {**always, "activations": 0.05 * saved, "gradients": trained}),
            ("optimizer", {**always, "gradients": trained, "temporary": self.foreach * trained}),
            ("evaluation", {**always, "gathered_outputs": self.gathered}),
        ]
        compute = (self.launch + self.arithmetic * tokens) * (1 + self.recompute * share)
        compute *= (0.75 if model.lora else 1.0) * (1.2 if model.quantization else 1.0)
        compute *= 1 + self.eager * (model.attn_implementation == "eager")
        slower = self.implementation if train.optim != "adamw_torch_fused" else 0.0
        seconds = train.gradient_accumulation_steps * compute + self.update * (1 + slower) * trained / self.weights
        return phases, 0.05 * saved * ("expandable" not in workload.allocator), seconds

    def needed(self, workload: Workload) -> tuple[float, float]:
        """Return the memory that a training takes, and seconds for each token of a sample."""
        phases, cache, seconds = self.held(workload)
        most = max(sum(parts.values()) for _, parts in phases)
        return most + cache, seconds / (workload.data.sequence_length or 256)


@dataclass
class Pretender:
    """An executor that answers by a ``Model``, and keeps what it was asked."""

    like: Prediction
    model: Model
    jobs: int = 2
    fails: Callable[[Workload], bool] = lambda workload: False
    error: TrainatomyError = field(default_factory=lambda: SimulationError("cannot"))
    asked: list[Workload] = field(default_factory=list)
    interrupt_after: int | None = None

    def kinship(self, workload: Workload) -> str | None:
        return None

    def pick(self, kinships: Sequence[str | None]) -> int:
        return 0

    def submit(self, workload: Workload) -> Future[Prediction | TrainatomyError]:
        if self.interrupt_after is not None and len(self.asked) >= self.interrupt_after:
            raise KeyboardInterrupt
        self.asked.append(workload)
        future: Future[Prediction | TrainatomyError] = Future()
        future.set_result(self.error if self.fails(workload) else self.prediction(workload))
        return future

    def prediction(self, workload: Workload) -> Prediction:
        phases, cache, seconds = self.model.held(workload)
        gpu = workload.resolve_gpu()
        sizes = [(phase, {name: round(size * GIB) for name, size in parts.items()}) for phase, parts in phases]
        timeline = tuple(TimelinePoint(0, 1, phase, parts) for phase, parts in sizes)
        peak = max((parts for _, parts in sizes), key=lambda parts: sum(parts.values()))
        components = Components.from_dict({**peak, "cache": round(cache * GIB)})
        device = components.total_bytes
        memory = replace(self.like.memory, components=components, device_bytes=device)
        samples = workload.train.per_device_train_batch_size * workload.train.gradient_accumulation_steps
        assert self.like.time is not None
        time = replace(
            self.like.time,
            step_seconds=seconds,
            interval_seconds=(0.9 * seconds, 1.2 * seconds),
            samples_per_second=samples / seconds,
            tokens_per_second=samples * (workload.data.sequence_length or 256) / seconds,
            gpu_seconds=seconds,
            host_seconds=0.1 * seconds,
        )
        card = replace(self.like.card, id=gpu.id, name=gpu.name, memory_bytes=gpu.memory_bytes)
        fits = device <= gpu.memory_bytes
        return replace(
            self.like, workload=workload.to_mapping(), memory=memory, time=time, fits=fits, card=card,
            timeline=timeline, room_bytes=gpu.memory_bytes - device,
        )  # fmt: skip
