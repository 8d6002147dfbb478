"""Notes on what executing a training assumed: choices that decide a size, plans of cuDNN, values that do not exist."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set

from trainatomy.catalog.gpus import has_recorded_engines
from trainatomy.operators.allocation.cudnn.backend import EXTRA
from trainatomy.results.operations import Call
from trainatomy.results.trace import PlansTried
from trainatomy.simulator.recorder import Recorder
from trainatomy.simulator.storages import HostMemory
from trainatomy.simulator.values import Values
from trainatomy.units import human_bytes

_MAX_PLACES = 3
"""Places that a note names."""


def trial_notes(trials: Mapping[int, PlansTried], *, known: bool) -> Iterator[str]:
    """Yield a note where convolutions tried cuDNN's algorithms; ``known``: its library names them."""
    if not trials:
        return
    timed = max(each.timed for each in trials.values())
    yield (
        f"torch.backends.cudnn.benchmark is on: for {len(trials)} convolutions PyTorch tries cuDNN's algorithms in the "
        f"first call, with the largest workspace of all, and keeps the fastest of the first {timed} (torch.backends."
        "cudnn.benchmark_limit), here assumed to be the one that cuDNN's heuristics prefer; algorithms by FFT, which "
        "need the most and are named on a GPU only, are counted where an H200 mostly tried them"
    )
    if not known:
        yield f"without cuDNN's library only a few of these algorithms are known; the first step may need more: {EXTRA}"


def plan_notes(calls: Sequence[Call], cudnn: str | None) -> Iterator[str]:
    """Yield a note where a version of cuDNN chose convolutions' plans whose choices on a GPU were not recorded."""
    if cudnn is None or has_recorded_engines(cudnn):
        return
    if any(call.name.startswith("aten::convolution") for call in calls):
        yield (
            f"cuDNN {cudnn} names the plans of convolutions as it does without a driver; which others run on a GPU was "
            "recorded with 9.19 only (9.20 names the same), so that some workspaces may differ"
        )


def run_notes(recorder: Recorder) -> Iterator[str]:
    """Yield notes on what the run assumes: choices that decide a size, comparisons of tokens, memory without a rule."""
    yield from _choice_notes(recorder.values)
    for name, what in recorder.uncounted.items():
        yield f"{name} allocates more on a GPU than is counted: {what}"
    if written := sorted(recorder.mixed.written):
        yield (
            f"computed values are written to tensors in host memory ({', '.join(written)}), where they count "
            "as 0 and True, and as False if they say that something overflows"
        )
    if recorder.too_long_transcript is not None:
        labels, frames = recorder.too_long_transcript
        yield (
            f"a transcript has {labels} labels and its sound {frames} frames, so that the loss of CTC is infinite and "
            "its gradients are no numbers, for which some kernels are quicker (in bf16 up to 11 times): set "
            "data.target_length to what is spoken, about 15 letters or 3.5 word pieces a second"
        )
    yield from _random_notes(recorder.host_draws & recorder.unseeded)
    if recorder.scalar_reads.numbers_differ:
        yield (
            "Python code asks whether computed whole numbers, such as generated tokens, are equal: they are assumed to "
            "differ, so that a loop that waits for a token runs to its limit"
        )


def _random_notes(unseeded: Set[str]) -> Iterator[str]:
    """Yield a note where forward passes take random numbers, and do something else each time, that nobody seeds."""
    if unseeded:
        yield (
            f"what the forward pass computes depends on random numbers of {' and '.join(sorted(unseeded))}, which the "
            "script does not seed: every run differs, in memory and time, and this is one of them"
        )


def _choice_notes(values: Values) -> Iterator[str]:
    """Yield a note where an assumed choice decided the size of something."""
    if "draw" in values.deciding:
        yield (
            "what is computed, or how large some results are, depends on random numbers that the GPU draws; others are "
            "drawn here, so that these sizes differ a little"
        )
    if "choice" in values.deciding:
        yield (
            "how large some results are, such as the rows that each expert gets, depends on values: topk, max, argmax, "
            "multinomial and the like are assumed to pick all entries equally often, so what they pick is spread evenly"
        )


def selection_notes(places: tuple[str, ...]) -> Iterator[str]:
    """Yield a note where operations select by values that do not exist; ``places``: these operations, each once."""
    if not places:
        return
    named = ", ".join(places[:_MAX_PLACES])
    more = f" and {len(places) - _MAX_PLACES} more" if len(places) > _MAX_PLACES else ""
    yield (
        f"what these operations select depends on computed values: {named}{more}; it is assumed to be everything, and "
        "all values to differ: the most that they can return, so memory and time may be lower on a GPU"
    )


def host_memory_notes(host: HostMemory) -> Iterator[str]:
    """Yield a note where autograd saves in host memory."""
    if host.pinned:
        yield (
            f"{human_bytes(host.pinned)} of pinned host memory hold activations, in blocks that PyTorch rounds up to "
            "powers of two"
        )
    if host.pageable:
        yield (
            f"{human_bytes(host.pageable)} of host memory hold activations; it is not pinned, so that copies take "
            "several times as long"
        )
