"""Problems between the settings of a workload: rules of the table, and what several settings make together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainatomy.workload.deepspeed import deepspeed_problems
from trainatomy.workload.fsdp import fsdp_problems
from trainatomy.workload.instance import instance_problems
from trainatomy.workload.loops import LOOPS
from trainatomy.workload.section import Problem
from trainatomy.workload.support import BETWEEN_SECTIONS, WITHIN_SECTIONS, Features, unsupported
from trainatomy.workload.trl import trl_problems

if TYPE_CHECKING:
    from trainatomy.workload.schema import Workload

MAX_BATCH_SAMPLES = 2**22
"""Samples in a batch: to join more takes the CPU many seconds."""
MAX_BATCH_ELEMENTS = 2**30
"""Samples times tokens in a batch. One activation of 256 float32 values for each would take 1 TiB."""


MAX_ACCUMULATION = 10_000
"""Micro-batches of a step: what each allocates is kept, and 100,000 of them take 16 GiB of host memory."""


def contradictions(workload: Workload) -> list[Problem]:
    """Return problems within the sections of a workload, or where there are none, those between its sections."""
    has, degrees = Features(workload), workload.parallel.degree_problems()
    within = [Problem(("parallel", *each.path), each.message) for each in degrees] + instance_problems(workload)
    within += unsupported(has, WITHIN_SECTIONS)
    return within or [
        *_of_libraries(workload),
        *_oversized_batch(workload),
        *_oversized_step(workload),
        *unsupported(has, BETWEEN_SECTIONS),
    ]


def _of_libraries(workload: Workload) -> list[Problem]:
    """Return problems of the configurations that other libraries read, whose keys are theirs."""
    train = workload.train
    if workload.mode != "training" or not LOOPS[workload.loop].by_trainer:
        return []
    deepspeed = [] if train.deepspeed is None else deepspeed_problems(train.deepspeed)
    return [
        *(Problem(("train", "deepspeed", *each.path), each.message) for each in deepspeed),
        *(fsdp_problems(workload) if train.fsdp else []),
        *trl_problems(workload),
    ]


def _oversized_batch(workload: Workload) -> list[Problem]:
    """Refuse batches that fit on no GPU, whose tensors would take minutes to make on the CPU."""
    tokens = 1 if workload.data.factory else workload.data.sequence_length or 1
    if workload.batch_size <= MAX_BATCH_SAMPLES and workload.batch_size * tokens <= MAX_BATCH_ELEMENTS:
        return []
    is_eval = workload.mode != "training" and workload.train.per_device_eval_batch_size is not None
    name = "per_device_eval_batch_size" if is_eval else "per_device_train_batch_size"
    message = f"is too large for any GPU: {workload.batch_size:,} samples"
    return [Problem(("train", name), message + (f" of {tokens:,} tokens" if tokens > 1 else ""))]


def _oversized_step(workload: Workload) -> list[Problem]:
    """Refuse steps of so many micro-batches that the host's memory would be full before they are predicted."""
    count = workload.train.gradient_accumulation_steps
    if workload.mode != "training" or count <= MAX_ACCUMULATION:
        return []
    message = f"{count:,} micro-batches are more than are simulated in a step ({MAX_ACCUMULATION:,}): use larger ones"
    return [Problem(("train", "gradient_accumulation_steps"), message)]
