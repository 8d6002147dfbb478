"""Contexts in which libraries with kernels of their own run without a GPU, each where the workload uses it."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from functools import partial

from trainatomy.libraries import import_library, version_of
from trainatomy.operators.allocation.plan import Processor
from trainatomy.simulator.adapters.flash_attention import NAME as FLASH_ATTENTION
from trainatomy.simulator.adapters.flash_attention import simulated_flash_attention
from trainatomy.simulator.adapters.torchao import packed_weights
from trainatomy.simulator.adapters.triton import simulated_liger, simulated_triton, uses_liger
from trainatomy.simulator.process import SimulatedProcess
from trainatomy.workload.arguments import arguments, is_factory
from trainatomy.workload.loops import loop_of
from trainatomy.workload.schema import Workload


@contextlib.contextmanager
def quantised_kernels(process: SimulatedProcess, outliers: float, libraries: Collection[str]) -> Iterator[None]:
    """Let layers whose weights are quantised by some libraries run without a GPU."""
    with (
        _torchao(process, wanted="torchao" in libraries),
        _bitsandbytes(process, outliers, wanted="bitsandbytes" in libraries),
    ):
        yield


@contextlib.contextmanager
def _torchao(process: SimulatedProcess, *, wanted: bool) -> Iterator[None]:
    if not wanted:
        yield
        return
    import_library("torchao", "model.quantization")
    with packed_weights(process):
        yield


@contextlib.contextmanager
def _bitsandbytes(process: SimulatedProcess, outliers: float, *, wanted: bool) -> Iterator[None]:
    if not wanted:
        yield
        return
    import_library("bitsandbytes", "model.quantization")
    from trainatomy.simulator.adapters.bitsandbytes import no_shared_code_books, quantised_operators

    with no_shared_code_books():
        answering = partial(process.recorder.scalar_reads.true_at_most, 1 if outliers else 0)
        process.use_functions(quantised_operators(answering, process.on_host, outliers))
        yield


@contextlib.contextmanager
def optimizer_library(workload: Workload, process: SimulatedProcess) -> Iterator[None]:
    """Open a context in which optimizers of other libraries run without a GPU."""
    optim = workload.train.optim
    package = None if is_factory(optim) else arguments().package_of(optim)
    may_call = is_factory(optim) or package == "galore_torch"
    with contextlib.ExitStack() as stack:
        if package in _WITH_TRITON:
            import_library("triton", "train.optim")
            stack.enter_context(simulated_triton())
        if package == "bitsandbytes" or (may_call and version_of("bitsandbytes") is not None):
            stack.enter_context(_bitsandbytes_optimizer(process))
        yield


_WITH_TRITON = ("torch_optimi", "optimi")
"""Names of a package of optimizers that run kernels of Triton."""


@contextlib.contextmanager
def _bitsandbytes_optimizer(process: SimulatedProcess) -> Iterator[None]:
    from trainatomy.simulator.adapters.bitsandbytes import paged_notes, simulated_bitsandbytes

    with simulated_bitsandbytes(process.on_host) as paged:
        yield
        process.notes.extend(paged_notes(paged))


def triton_kernels(workload: Workload) -> contextlib.AbstractContextManager[object]:
    """Return a context in which Triton kernels of libraries run without a GPU: Liger's and TRL's."""
    stack = contextlib.ExitStack()
    if uses_liger(workload):
        stack.enter_context(simulated_liger())
    if workload.mode == "training" and loop_of(workload).settings is not None:
        from trainatomy.simulator.adapters.triton import simulated_trl

        stack.enter_context(simulated_trl())
    return stack


def attention_library(workload: Workload, processor: Processor) -> contextlib.AbstractContextManager[object]:
    """Return a context in which FlashAttention 2 is found and runs without a GPU, where the workload uses it."""
    if workload.model.attn_implementation != FLASH_ATTENTION:
        return contextlib.nullcontext()
    return simulated_flash_attention(processor)


def engine_library(workload: Workload, process: SimulatedProcess) -> contextlib.AbstractContextManager[object]:
    """Return a context in which DeepSpeed runs without a GPU, where the workload uses it."""
    if workload.train.deepspeed is None:
        return contextlib.nullcontext()
    from trainatomy.simulator.parallel.deepspeed import simulated_deepspeed

    return simulated_deepspeed(process)
