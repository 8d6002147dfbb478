"""Quantised weights in a dry run: load them, and say where a script asks for them and gets others."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from trainatomy.errors import SimulationError
from trainatomy.scripts.job import current_place
from trainatomy.simulator.live import loading
from trainatomy.training.quantization import load_quantised, quantisation_notes
from trainatomy.training.stored_weights import library_of
from trainatomy.workload.quantization import refusal

if TYPE_CHECKING:
    from torch import nn

    from trainatomy.scripts.standins.notes import StandIns
    from trainatomy.simulator.process import SimulatedProcess

_NO_OUTLIERS = 0.0


def install(stand_ins: StandIns) -> None:
    """Say it where a script asks for quantised weights and gets others."""
    stand_ins.when("transformers.utils.quantization_config", partial(_put_check, stand_ins))


def _put_check(stand_ins: StandIns, module: Any) -> None:
    """Say it where a script asks for quantised weights and gets others: a library may leave them out silently."""
    original, notes = module.BitsAndBytesConfig.__init__, stand_ins.process.notes
    asked: list[str] = []

    def make(self: Any, *arguments: Any, **options: Any) -> None:
        original(self, *arguments, **options)
        bits = 4 if self.load_in_4bit else 8 if self.load_in_8bit else 0
        if bits and not asked:
            asked.append(f"weights of {bits} bits are asked for at {current_place(stand_ins.script) or 'the script'}")

    def check() -> None:
        if asked and not any("quantised weights" in note for note in notes):
            notes.append(f"{asked[0]}, and no layer has them: the figures are those of weights in 16 or 32 bits")

    stand_ins.put(module.BitsAndBytesConfig, "__init__", make)
    stand_ins.stack.callback(check)


def load(process: SimulatedProcess, model: Any, settings: Any, *, stored: bool = False) -> nn.Module:
    """Load a model that was built in host memory with quantised weights on the GPU, as ``from_pretrained`` does.

    Args:
        process: The simulated process.
        model: The model with its weights in 16 or 32 bits.
        settings: A ``BitsAndBytesConfig`` or ``TorchAoConfig``, or its content.
        stored: Whether the checkpoint is stored so; else its weights are quantised while it is loaded.

    Raises:
        SimulationError: Another library quantises the weights.
    """
    from transformers.integrations import is_deepspeed_zero3_enabled

    arguments = settings if isinstance(settings, Mapping) else settings.to_dict()
    why = refusal(library_of(arguments), dequantize=False)
    if why is None and is_deepspeed_zero3_enabled():
        why = (
            "weights that DeepSpeed's ZeRO-3 partitions are not simulated with quantised weights: use stage 2, or FSDP"
        )
    if why is not None:
        raise SimulationError(f"quantization_config: {why}")
    with loading(process.on_host):
        loaded = load_quantised(model, dict(arguments), "cuda", stored=stored)
    process.modules.learn(loaded)
    process.notes.extend(quantisation_notes(loaded, _NO_OUTLIERS))
    return loaded
