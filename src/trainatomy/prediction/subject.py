"""What a prediction is of: the settings of a training as its loop, its model and its operations show them.

Sizes of a predicted training that tensor cores take badly, and what padding them saves.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from trainatomy.analysis.operation_table import OperationTable
from trainatomy.analysis.shapes import paddings, wasteful_shapes
from trainatomy.catalog.calibrations import Calibration
from trainatomy.results.operations import Padding
from trainatomy.results.prediction import Subject
from trainatomy.results.time import Time
from trainatomy.timing.cost_model import cost_model_of, kernel_cost, tensor_cores_for_fp32
from trainatomy.training.lengths import drawn_sizes
from trainatomy.workload.lengths import rank_of
from trainatomy.workload.model import ModelSpec
from trainatomy.workload.schema import Workload
from trainatomy.workload.sentence_transformers import sequences_of

if TYPE_CHECKING:
    from trainatomy.simulator.simulation import Simulation


_FUSED_ATTENTION = re.compile(r"aten::_scaled_dot_product_(?:fused_)?(flash|efficient|cudnn)_attention\b")


def subject_of(workload: Workload, simulation: Simulation) -> Subject:
    """Return what was simulated."""
    train, trains = workload.train, workload.mode == "training"
    counts = simulation.trainable_parameters, simulation.parameters
    is_whole = workload.model.lora is not None or counts[0] == counts[1] or not trains
    return Subject(
        models=simulation.models,
        mode=workload.mode,
        loop=simulation.loop or workload.loop,
        weights_dtype=simulation.weights_dtype,
        autocast=_autocast(workload),
        tf32=bool(workload.tf32),
        quantization=_quantization(workload.model, simulation),
        lora_rank=None if workload.model.lora is None else workload.model.lora.r,
        trained_share=None if is_whole else counts[0] / max(counts[1], 1),
        optimizer=train.optim if trains else None,
        attention=simulation.attention,
        attention_kernels=_attention_kernels(simulation),
        batch_size=workload.batch_size,
        inputs=_inputs(workload, simulation),
        lengths=_lengths(workload),
        beams=workload.generation.num_beams if workload.mode == "generation" else 1,
        new_tokens=workload.generation.max_new_tokens if workload.mode == "generation" else None,
        accumulation_steps=train.gradient_accumulation_steps if trains else 1,
        checkpointing=_checkpointing(workload, simulation),
        compiled=trains and train.compiles,
        keeps_gradients=trains and not workload.zero_grad_set_to_none,
        torch=workload.software.torch,
        era=workload.era,
    )


def _autocast(workload: Workload) -> str | None:
    """Return the dtype of mixed precision; inference and generation cast weights instead."""
    if workload.mode != "training":
        return None
    return "fp16" if workload.train.fp16 else "bf16" if workload.train.bf16 else None


def _checkpointing(workload: Workload, simulation: Simulation) -> int:
    """Return every how many layers are recomputed; 1 where a script or a model does it itself."""
    train = workload.train
    if workload.mode != "training":
        return 0
    if train.gradient_checkpointing:
        return train.gradient_checkpointing_every
    return int(any(operation.phase == "recompute" for operation in simulation.operations.operations))


def _quantization(model: ModelSpec, simulation: Simulation) -> str | None:
    """Return how the weights are quantised: as the workload says, or as they are stored."""
    spec = model.quantization
    if spec is None or not model.is_quantised:
        return simulation.stored_quantization
    if spec.quant_method != "bitsandbytes":
        return spec.torchao_type or spec.quant_method
    return spec.bnb_4bit_quant_type if spec.load_in_4bit else "int8" if spec.load_in_8bit else None


def _attention_kernels(simulation: Simulation) -> tuple[str, ...]:
    """Return the fused kernels of attention that PyTorch chose for a step."""
    found = (_FUSED_ATTENTION.fullmatch(call.name) for call in simulation.operations.calls)
    return tuple(sorted({match[1] for match in found if match}))


def _inputs(workload: Workload, simulation: Simulation) -> dict[str, tuple[int, ...]]:
    """Return the shape of each input of a sample; the tokens of text are known of every loop."""
    if simulation.input_shapes or simulation.tokens_per_sample is None:
        return dict(simulation.input_shapes)
    return {"input_ids": (simulation.tokens_per_sample // sequences_of(workload),)}


def _lengths(workload: Workload) -> tuple[int | str, int | str] | None:
    """Return the shortest and the longest of samples that differ in length."""
    if not workload.data.varies:
        return None
    drawn = sorted(drawn_sizes(workload), key=rank_of)
    return drawn[0], drawn[-1]


LEAST_SHARE = 0.01
"""Share of a step that a padding has to save to be mentioned."""


def paddings_of(
    workload: Workload, simulation: Simulation, calibration: Calibration | None, time: Time
) -> tuple[Padding, ...]:
    """Return the sizes whose padding saves a noticeable part of the step, the largest gain first."""
    gpu, operations = workload.resolve_gpu(), simulation.operations
    if gpu.is_amd:
        return ()  # the rules are those of cuBLAS
    table = OperationTable(operations, None, None, [True] * len(operations.operations))
    shapes = wasteful_shapes(table, gpu.capability, gpu.multiprocessors, bool(workload.tf32))
    if not shapes:
        return ()
    tf32 = tensor_cores_for_fp32(workload.tf32, simulation.torch_version)
    model = cost_model_of(gpu, calibration, tf32=tf32, links=workload.parallel.links(gpu))
    found = paddings(shapes, table, workload.to_mapping(), lambda call: kernel_cost(call, model).seconds)
    return tuple(each for each in found if each.setting and (each.gain_seconds or 0) >= LEAST_SHARE * time.step_seconds)
