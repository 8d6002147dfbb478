"""What launching operations costs the CPU of a host, and what its loops add (``catalog/hosts.yaml``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class CPUCosts:
    """CPU costs in seconds.

    Attributes:
        graph: Launching one operation of each of ``launch.KINDS`` in a forward pass of a training.
        without_graph: The same in generation, evaluation and inference, as a share of ``graph``; see ``launch.OTHER``.
        recomputed: The same in recomputation in backward, calls of modules included, as a share of ``graph``.
        looped: The same in a loop written in Python (``python_loops``), as a share of ``graph``, by kind; of others: 1.
        backward: The same in backward, and of adding up the gradients of a tensor (``launch.ACCUMULATION``), which
            autograd's engine does between its nodes.
        plain: The same outside of both.
        list_item: Each tensor of a list argument.
        module_call: Calling one module.
        forward_pass: What the forward pass of each micro-batch of a training takes besides its operations and modules:
            contexts that are entered and left, code that the CPU's caches have lost since the last one.
        backward_pass: The same of each backward pass: autograd's engine and its threads wake up, and free the graph.
        checkpoint: A checkpointed region, by where it is entered: forward, or backward, to be recomputed.
        python_call: A call of a hook of saved tensors, by the class that has it and the phase, or of what
            ``simulator.python_calls`` counts, with the Python code around it; see ``launch.OTHER``.
        optimizer_step: Entering the optimizer's step, including its hooks and the scheduler's, by loop.
        step: Time that a loop (trainer, trl, pytorch, inference, generation, evaluation) adds to each step.
        collate: Time that it adds to a step besides, to make a batch of samples.
        sample: Time that it adds for each sample: the loader draws its index and asks the data set for it.
        micro_step: Time that a loop adds to each micro-batch.
        token: Time that ``generate()`` adds to each further token.
        module_micro_step: Time that a loop adds to each micro-batch for each module (``model.train()``).
        parameter_step: Time that a loop adds to each step for each parameter tensor (walks over them, clipping).
        batch_byte: Each byte of a batch, by loop, where samples are not stacked: they are lists of tokens, or the
            batch is there.
        stacking: Stacking samples into a batch (``timing/collation.py``): each ``byte`` by one thread, each byte of new
            pages by one thread besides (``page_byte``), and waking up each further ``thread`` for each sample.
        threads: Threads that work on a tensor of the CPU.
        read: Waking up after waiting for the GPU.
        after_wait: How much longer the loop's work of a step takes after a long wait for the GPU, as a share of it:
            what it touches has left the CPU's caches.
        long_wait: A wait after which it takes that much longer; after a shorter one, proportionally less.
        launch_delay: From launching a kernel until it can start on an idle GPU.
        sharded_call: Calling an operator with sharded tensors (``DTensor``), besides the operations inside it.
        sharded_collective: FSDP's Python around gathering the weights of a layer, or around reducing its gradients.
        resized_storage: FSDP's Python around taking or freeing the memory of one gathered weight.
        engine_module: DeepSpeed's Python (ZeRO-3) around one module in forward or backward.
        engine_gradient: DeepSpeed's Python for one gradient.
        replicated_module: ``DataParallel``'s Python for one copy of one module.
        host_byte: Reading or writing a byte of host memory in an operation on large tensors of the CPU, by all threads.
        new_host_byte: Each byte of a large new tensor of the CPU besides: the operating system hands out its pages.
        one_thread_byte: The same as both by one thread, as in processes that ``torchrun`` starts.
        recurrent_layer: Each layer and direction of a recurrent network, by where it is launched.
        recurrent_launch: What cuDNN launches inside of one, by pass: each ``kernel``, each ``step`` of a layer that is
            not fused, each direction of the layer below for which such a step waits (``follower``), and each ``part``
            of the sequence beyond the first for which a layer's inputs are multiplied; what a step of ``misaligned``
            rows takes less.
        inner_kernel: Each kernel that cuDNN launches for a group that it convolves alone.
    """

    graph: Mapping[str, float]
    without_graph: Mapping[str, float]
    recomputed: float
    looped: Mapping[str, float]
    backward: Mapping[str, float]
    plain: Mapping[str, float]
    list_item: float
    module_call: float
    forward_pass: float
    backward_pass: float
    checkpoint: Mapping[str, float]
    python_call: Mapping[str, float]
    optimizer_step: Mapping[str, float]
    step: Mapping[str, float]
    collate: Mapping[str, float]
    sample: Mapping[str, float]
    micro_step: Mapping[str, float]
    token: float
    module_micro_step: Mapping[str, float]
    parameter_step: Mapping[str, float]
    batch_byte: Mapping[str, float]
    stacking: Mapping[str, float]
    threads: int
    read: float
    after_wait: float
    long_wait: float
    launch_delay: float
    sharded_call: float = 0.0
    sharded_collective: float = 0.0
    resized_storage: float = 0.0
    engine_module: float = 0.0
    engine_gradient: float = 0.0
    host_byte: float = 0.0
    new_host_byte: float = 0.0
    one_thread_byte: float = 0.0
    replicated_module: float = 0.0
    recurrent_layer: Mapping[str, float] = field(default_factory=dict)
    recurrent_launch: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    inner_kernel: float = 0.0


PARTS = {
    "graph": (
        "graph",
        "module_call",
        "forward_pass",
        "checkpoint",
        "python_call",
        "sharded_call",
        "sharded_collective",
        "resized_storage",
        "engine_module",
        "engine_gradient",
        "replicated_module",
    ),
    "backward": ("backward", "backward_pass", "recurrent_layer", "recurrent_launch", "inner_kernel"),
    "plain": ("plain", "list_item", "optimizer_step"),
    "loop": ("step", "collate", "sample", "micro_step", "token", "module_micro_step", "parameter_step"),
    "batch": ("batch_byte", "stacking"),
}
"""Fields of ``CPUCosts`` by part of a step; a calibration has a factor for each part."""
PYTHON_COLLATING = frozenset({"trl"})
"""Loops whose batches are made of lists of tokens, in Python; others copy samples."""


def cpu_costs(
    microseconds: Mapping[str, Any],
    factors: Mapping[str, float] | None = None,
    pace: float = 1.0,
    recurrent_exponent: float = 1.0,
    copy_exponent: float = 1.0,
) -> CPUCosts:
    """Build the costs from microseconds as in ``hosts.yaml``.

    Args:
        microseconds: The costs.
        factors: What each of ``PARTS`` is multiplied by.
        pace: What all of ``PARTS`` are multiplied by besides.
        recurrent_exponent: Power of the pace with which ``recurrent_launch`` grows.
        copy_exponent: Power of the pace with which ``stacking`` grows, and ``batch_byte`` but for ``PYTHON_COLLATING``.
    """
    shares = {name: microseconds[name] for name in ("without_graph", "recomputed", "looped", "after_wait", "threads")}
    costs = _scaled(microseconds, 1e-6) | shares
    for part, names in PARTS.items():
        factor = (factors or {}).get(part, 1.0) * pace
        costs |= {name: _scaled(costs[name], factor) for name in names}
    costs["recurrent_launch"] = _scaled(costs["recurrent_launch"], pace ** (recurrent_exponent - 1))
    costs["stacking"] = _scaled(costs["stacking"], pace ** (copy_exponent - 1))
    costs["batch_byte"] = {
        loop: seconds if loop in PYTHON_COLLATING else seconds * pace ** (copy_exponent - 1)
        for loop, seconds in costs["batch_byte"].items()
    }
    return CPUCosts(**costs)


def not_collating(costs: CPUCosts) -> CPUCosts:
    """Return the costs of a loop for which a function returns batches as they are."""
    return replace(
        costs,
        batch_byte=dict.fromkeys(costs.batch_byte, 0.0),
        stacking=dict.fromkeys(costs.stacking, 0.0),
        collate=dict.fromkeys(costs.collate, 0.0),
    )


def by_one_thread(costs: CPUCosts) -> CPUCosts:
    """Return the costs of a process whose operations on tensors of the CPU run on one thread."""
    return replace(costs, host_byte=costs.one_thread_byte, new_host_byte=0.0, threads=1)


def _scaled(value: Any, factor: float) -> Any:
    if isinstance(value, Mapping):
        return {name: _scaled(item, factor) for name, item in value.items()}
    return value * factor
