"""Sentences about result values, as plain text, for text pages and JSON version 1."""

from __future__ import annotations

import re
from collections.abc import Sequence

from trainatomy.reporters.labels import BOUNDS, FACTS
from trainatomy.reporters.script_sentences import fills_later, not_reached
from trainatomy.results.duration import Duration
from trainatomy.results.measurement import Measurement
from trainatomy.results.memory import Instant, Memory, OutOfMemoryPoint, PeakRange
from trainatomy.results.operations import Claim, Padding
from trainatomy.results.prediction import BytesPerParameter, Fact, Prediction
from trainatomy.results.time import Communication, Pipeline, Power, Time
from trainatomy.units import count_of, human_bytes, many, percent, rate, seconds, times

NVML = (
    "The first version of NVML's memory call counts the driver's own reservation as used, even on an idle GPU; "
    "nvidia-smi does not. The CUDA context and loaded kernels lie outside PyTorch's allocator: none of PyTorch's "
    "counters include them."
)
"""Explanation of the differences between the figures of NVML, nvidia-smi and PyTorch."""

_SCRATCH = re.compile(r"(?P<operator>\S+) \(.+\)")
"""An operation whose own scratch memory is meant: ``aten::sum (semaphores 0)``."""

_NOTICEABLE = 1.05
"""Growth of a step on a slow host from which the page mentions it."""


def fit(prediction: Prediction) -> str:
    """Return what follows the verdict: `` on T4 (14.6 GiB): needs 5.18 GiB, 9.39 GiB to spare``."""
    gpu, needed = prediction.gpu, human_bytes(prediction.memory.device_bytes)
    asked = any(fact.name == "convolutions" and fact.value == "library" for fact in prediction.facts)
    tried = prediction.trials and not asked  # only cuDNN's library names what is tried
    least = "at least " if tried or not prediction.memory.components.context else ""
    run = prediction.script
    if run is not None and prediction.out_of_memory is None and (later := fills_later(run, prediction.room_bytes)):
        return f" on {gpu.name} ({human_bytes(gpu.memory_bytes)}): {later.format(needed=least + needed)}"
    left = not_reached(run) if run is not None and prediction.fits else ""
    rest = f"; not reached: {left}" if left else ""
    return f" on {gpu.name} ({human_bytes(gpu.memory_bytes)}): needs {least}{needed}, {_headroom(prediction)}{rest}"


def _headroom(prediction: Prediction) -> str:
    room = prediction.room_bytes
    if room < 0:
        return f"{human_bytes(-room)} short"
    if not prediction.fits:
        return f"fails because of fragmentation although {human_bytes(room)} would be left"
    most = "" if prediction.memory.components.context else "at most "
    parts = [f"{most}{human_bytes(room)} to spare{_worst_case(prediction)}"]
    if retries := prediction.memory.num_alloc_retries:
        parts.append(cache_freed(retries))
    if count := prediction.without_workspace:
        uses = "uses a slower algorithm" if count == 1 else "use slower algorithms"
        parts.append(f"{many(count, 'convolution')} {uses} for lack of workspace memory")
    return "; ".join(parts)


def _worst_case(prediction: Prediction) -> str:
    """Return what would be left in the worst case, where a training is tight because of that alone."""
    memory = prediction.memory
    worst = prediction.room_bytes - (memory.worst_device_bytes - memory.device_bytes)
    if prediction.verdict != "tight" or worst == prediction.room_bytes:
        return ""
    return (
        f", {human_bytes(worst)} in the worst case"
        if worst >= 0
        else f", {human_bytes(-worst)} short in the worst case"
    )


def cache_freed(count: int) -> str:
    """Return a clause about the allocator's retries (``num_alloc_retries``)."""
    return f"the allocator has to free its cache {times(count)}"


def out_of_memory(point: OutOfMemoryPoint, *, predicted: bool) -> str:
    """Return where a training runs, or ran, out of memory."""
    verb = "It would run" if predicted else "It ran"
    return f"{verb} out of memory {instant(point.instant)}: {failed_allocation(point)}."


def failed_allocation(point: OutOfMemoryPoint) -> str:
    """Return ``128 MiB requested with 5.00 GiB allocated and 5.20 GiB reserved``."""
    held = f"with {human_bytes(point.allocated_bytes)} allocated and {human_bytes(point.reserved_bytes)} reserved"
    return f"{human_bytes(point.requested_bytes)} requested {held}" if point.requested_bytes else held


def instant(at: Instant) -> str:
    """Return ``in step 2, backward, in encoder.layer.3 (aten::mm)``; steps count from 1 here."""
    where = f", in {at.module}" if at.module else ""
    if at.phase == "load":
        when = "while loading the model"
    elif at.step < 0:
        when = "before the first step"
    else:
        when = f"in step {at.step + 1}, {at.phase}"
    return f"{when}{where}{f' ({_operation(at.operation)})' if at.operation else ''}"


def _operation(operation: str) -> str:
    scratch = _SCRATCH.fullmatch(operation)
    return f"scratch memory of {scratch['operator']}" if scratch else operation


def step_time(time: Time, *, fits: bool = True, step: str = "", counted: str = "samples") -> str:
    """Return the time of a step in one line; for a training that does not fit, on a GPU with enough memory.

    Args:
        time: The time.
        fits: Whether the training fits.
        step: What the time is of, if not of a step with the samples that it says.
        counted: What the rate counts.
    """
    low, high = time.interval_seconds
    tokens = "" if time.tokens_per_second is None else f", {rate(time.tokens_per_second)} tokens/s"
    step = step or f"a step of {_samples(time)}"
    takes = f"{step} takes" if fits else f"with enough memory, {step} would take"
    return (
        f"{takes} {seconds(time.step_seconds)} (90 % interval: {seconds(low)} to {seconds(high)}): "
        f"{rate(time.samples_per_second)} {counted}/s{tokens}; {BOUNDS[time.bound_by]}"
    )


def duration(
    whole: Duration, cost_per_hour: float | None = None, price: str = "the given price", *, fits: bool = True
) -> str:
    """Return how long the whole training takes in one line, what that costs at a price, and what is not in it."""
    low, high = whole.interval_seconds
    takes = "takes" if fits else "would take"
    text = (
        f"the whole training, {_course(whole)}, {takes} {seconds(whole.seconds)} (90 % interval: {seconds(low)} to "
        f"{seconds(high)})"
    )
    if cost_per_hour is not None:
        cost = whole.cost(cost_per_hour)
        text += f"; at {price} it costs {cost.total:,.2f} ({cost.interval[0]:,.2f} to {cost.interval[1]:,.2f})"
    return f"{text}; not included: {', '.join(whole.left_out)}" if whole.left_out else text


def _course(whole: Duration) -> str:
    """Return ``3 epochs of 52,002 samples = 4,875 steps with 9 evaluations of 1,000 samples (6 min 02 s)``."""
    steps = many(whole.steps, "step")
    if whole.epochs is not None and whole.samples is not None:
        epochs = "1 epoch" if whole.epochs == 1 else f"{whole.epochs:g} epochs"
        steps = f"{epochs} of {many(whole.samples, 'sample')} = {steps}"
    if whole.made_up_samples:
        steps += " (its data set was made up: --samples says how many rows it has)"
    tasks = []
    if whole.evaluations:
        size = "a few batches" if whole.evaluation_samples is None else many(whole.evaluation_samples, "sample")
        unsaid = "" if whole.evaluation_samples is not None else "; data.eval_samples says how many samples they have"
        tasks.append(f"{many(whole.evaluations, 'evaluation')} of {size} ({seconds(whole.evaluation_seconds)}{unsaid})")
    if whole.checkpoints:
        tasks.append(many(whole.checkpoints, "checkpoint"))
    return f"{steps} with {' and '.join(tasks)}" if tasks else steps


def _samples(time: Time) -> str:
    """Return the samples of a step on each GPU, with the tokens of each: ``8 samples of 512 tokens``."""
    samples = many(round(time.samples_per_second * time.step_seconds), "sample")
    if time.tokens_per_second is None:
        return samples
    return f"{samples} of {many(round(time.tokens_per_second / time.samples_per_second), 'token')}"


def all_ranks(shared: Communication) -> str:
    """Return what all GPUs process: ``8 GPUs: 512 samples/s, 65,536 tokens/s; 3.10 ms of 40.2 ms exposed ...``."""
    tokens = "" if shared.total_tokens_per_second is None else f", {rate(shared.total_tokens_per_second)} tokens/s"
    ranks = f" ({shared.data_parallel_size:,} data-parallel)" if shared.data_parallel_size != shared.gpus else ""
    return (
        f"{shared.gpus:,} GPUs{ranks} together: {rate(shared.total_samples_per_second)} samples/s{tokens}; "
        f"communication {seconds(shared.seconds)}, exposed {seconds(shared.exposed_seconds)}; "
        f"scaling efficiency {percent(shared.scaling_efficiency, 1)}"
    )


def pipeline(step: Pipeline) -> str:
    """Return ``of the GPUs' time: 1F1B with 4 stages and 8 micro-batches``."""
    return (
        f"of the GPUs' time, waiting for other stages: {step.schedule} with {many(step.stages, 'stage')} and "
        f"{step.micro_batches} micro-batches"
    )


def host(time: Time) -> str:
    """Return the host whose CPU costs are assumed, and what it is assumed to do besides."""
    return time.host if time.slow_host is None else f"{time.host}, without other work"


def slow_host(time: Time) -> tuple[str, str] | None:
    """Return the time of a step on a slow host, and how slow that one is; None where it takes about as long."""
    slow = time.slow_host
    if slow is None or slow.step_seconds < _NOTICEABLE * time.step_seconds:
        return None
    return seconds(slow.step_seconds), (
        f"a step if the CPU takes {slow.pace:.1f} times as long, as on the slowest shared machines so far; "
        "`trainatomy calibrate` measures yours"
    )


def power(found: Power) -> str:
    """Return ``of 700 W, without it 813 W: arithmetic takes 8 % longer at lower clocks``."""
    limit = f"of {found.limit_watts:.0f} W"
    if found.slowdown == 1:
        return limit
    longer = percent(found.slowdown - 1, 1, 0)
    return f"{limit}, without it {found.full_clock_watts:.0f} W: arithmetic takes {longer} longer at lower clocks"


def links(shared: Communication) -> str:
    """Return the links between GPUs, and whether those between machines are assumed."""
    return " and ".join(shared.links) + (" (assumed)" if shared.links_assumed else "")


def peak_range(peaks: PeakRange) -> str:
    """Return the peaks that depend on when memory is released."""
    allocated, reserved = (
        f"{human_bytes(low)} to {human_bytes(high)}" for low, high in (peaks.allocated_bytes, peaks.reserved_bytes)
    )
    if peaks.allocated_bytes[0] == peaks.allocated_bytes[1]:
        reason = "The high end: it is free only once the streams that use it are done, and NCCL has let go of it."
    else:
        reason = (
            "The high end: NCCL still holds the first buckets of DDP beside the new ones, because it checks only every "
            "100 ms which collectives are over. That differs between the ranks of one run."
        )
    return (
        f"Memory depends on timing: {allocated} allocated, {reserved} reserved. The low end: memory is free as soon as "
        f"its tensor dies. {reason}"
    )


def plan_range(peaks: PeakRange) -> str:
    """Return the peaks that depend on the plans that ``cudnn.benchmark`` finds the fastest."""
    parts = [
        f"{human_bytes(low)} to {human_bytes(high)} {name}"
        for name, (low, high) in (("allocated", peaks.allocated_bytes), ("reserved", peaks.reserved_bytes))
        if low != high
    ]
    return f"Depending on which algorithms cudnn.benchmark finds the fastest: {', '.join(parts)}."


def layout_range(peaks: PeakRange) -> str:
    """Return the peaks that depend on where the driver puts segments."""
    low, high = (human_bytes(one) for one in peaks.reserved_bytes)
    return (
        f"Reserved memory may be {low} to {high}: where the driver puts segments decides between free blocks of equal "
        "size, and that differs between processes."
    )


def skipped_steps(memory: Memory) -> str | None:
    """Return the peaks with first steps that gradient scaling skips; None where they look the same."""
    shown = human_bytes(memory.peak_allocated_bytes), human_bytes(memory.peak_reserved_bytes)
    counts: dict[tuple[str, str], list[str]] = {}
    for one in memory.skipped_steps:
        peaks = human_bytes(one.allocated_bytes), human_bytes(one.reserved_bytes)
        counts.setdefault(peaks, []).append(str(one.steps))
    parts = [
        f"{' or '.join(steps)} skipped: {allocated} allocated, {reserved} reserved"
        for (allocated, reserved), steps in counts.items()
        if (allocated, reserved) != shown
    ]
    if not parts:
        return None
    return (
        "Assumed: no gradient overflows in float16. Where one does, PyTorch skips the step, and the optimizer's states "
        f"are made later. Number of first steps {'; '.join(parts)}."
    )


def skipped_in_run(count: int) -> str:
    """Return how many first steps gradient scaling skipped in a run."""
    steps = "the first optimizer step" if count == 1 else f"the first {count} optimizer steps"
    return f"Gradients overflowed in float16, so PyTorch skipped {steps}: predicted totals are those of such a run."


def bytes_per_parameter(figures: BytesPerParameter) -> str:
    """Return ``18.30 bytes per parameter (rule of thumb: 18 for mixed precision with AdamW)``."""
    rule = f" (rule of thumb: {figures.rule:g} for {figures.rule_name})" if figures.rule is not None else ""
    return f"{figures.actual:.2f} bytes per parameter{rule}"


def parameters(figures: BytesPerParameter) -> str:
    """Return how many parameters there are and how many of them are trained."""
    trained = figures.trainable_parameters
    if trained == figures.parameters:
        return f"{count_of(figures.parameters)} parameters, all trained"
    share = percent(trained, figures.parameters, 2)
    return f"{count_of(figures.parameters)} parameters, {count_of(trained)} of them trained ({share})"


def versions(value: Prediction | Measurement) -> str:
    """Return ``torch 2.13.0, transformers 5.17.0``."""
    return ", ".join(f"{name} {version}" for name, version in value.versions.items())


def speed(measurement: Measurement) -> str:
    """Return ``250 ms per step, 16.0 samples/s, 2,048 tokens/s``, with the figures that are known."""
    if measurement.step_seconds is None:
        return "too few steps to measure the time per step"
    parts = [f"{seconds(measurement.step_seconds)} per step"]
    for figure, unit in ((measurement.samples_per_second, "samples/s"), (measurement.tokens_per_second, "tokens/s")):
        if figure is not None:
            parts.append(f"{rate(figure)} {unit}")
    return ", ".join(parts)


def fact_value(fact: Fact) -> str:
    """Return a size (``751 MiB``), a count (``3,770``), or a setting as it is."""
    if fact.amount is None:
        return fact.value
    return human_bytes(fact.amount) if fact.unit == "bytes" else f"{fact.amount:,}"


def fact_name(fact: Fact) -> str:
    """Return the title of a fact; a fact that an earlier version recorded has its title for a name."""
    return FACTS.get(fact.name, fact.name)


def fact_source(fact: Fact) -> str:
    """Return how the value was obtained."""
    if fact.source == "meta tensors":
        return "the real step, run on meta tensors (no data)"
    if fact.name == "allocator" and fact.source.startswith("PyTorch "):
        return f"simulation of the caching allocator of {fact.source}"
    if fact.name == "convolutions":
        return _convolutions(fact)
    return fact.source


def _convolutions(fact: Fact) -> str:
    """Return who chose the algorithms of convolutions."""
    if fact.value == "rules":
        return f"rules derived from {fact.source}"
    described = "" if fact.basis == "computed" else ", for a GPU described from its data sheet"
    return f"heuristics of cuDNN {fact.source}, asked without a GPU{described}"


def reasons(prediction: Prediction) -> list[str]:
    """Return why the bytes per parameter differ from the rule of thumb, one sentence each."""
    return [_reason(code, prediction) for code in prediction.bytes_per_parameter.reasons]


def _reason(code: str, prediction: Prediction) -> str:
    """Return the sentence for a code; anything else is a sentence that an earlier version recorded."""
    figures, memory = prediction.bytes_per_parameter, prediction.memory
    match code:
        case "autocast_copies_not_at_peak":
            copies = sum(line.bytes for line in memory.lines if line.name == "16-bit copies kept by autocast")
            return (
                "the rule counts a 16-bit copy of all weights (2 bytes per parameter); autocast holds "
                f"{copies / max(figures.parameters, 1):.2f} at the peak, because it copies matrix "
                "weights when they are first used and frees the copies when the forward pass ends"
            )
        case "frozen_parameters":
            return (
                f"only {figures.trainable_parameters:,} of {figures.parameters:,} parameters are trained; "
                "the others have no gradients and no optimizer states"
            )
        case "gradients_not_at_peak":
            step = memory.peak.step + 1
            return f"not all gradients exist at the peak, which is in the {memory.peak.phase} phase of step {step}"
        case "low_precision_parameters":
            model = prediction.workload.get("model")
            dtype = model.get("dtype") if isinstance(model, dict) else None
            some_are_frozen = figures.trainable_parameters < figures.parameters  # peft trains adapters in float32
            kept = "frozen weights" if some_are_frozen else "weights, gradients and optimizer states"
            return f"{kept} are kept in {dtype or '16 bits'}: 2 bytes each, not 4"
        case "optimizer_states_not_created":
            return "the peak is in the first step, before the optimizer has created its states"
        case "quantised_parameters":
            return "the weights of linear layers are kept in 4 or 8 bits, with a scale for each block or row of them"
        case "sharded":
            return "each GPU holds a part of the weights, gradients or optimizer states only"
    return code


def claim_sentence(claim: Claim) -> str:
    """Return what the guides claim of every training, with the figures of this one."""
    if claim.name == "backward_to_forward_flop":
        recompute = (
            "" if claim.recompute is None else f"; recomputation adds {claim.recompute / claim.forward:.2f} forwards"
        )
        return (
            f"Backward takes {claim.ratio:.2f} times the FLOP of forward{recompute} "
            "(the guides: twice, one gradient of the data and one of the weights for each product)."
        )
    return (
        f"Activation functions ({', '.join(claim.operators)}): for each tensor written, forward reads "
        f"{claim.forward_reads_per_write:.2g} and backward {claim.backward_reads_per_write:.2g}; "
        f"backward moves {claim.ratio:.2f} times the bytes "
        "(the guides: forward reads one and writes one, backward reads two and writes one: 1.5 times)."
    )


def padded_size(padding: Padding, step_seconds: float) -> str:
    """Return what padding a size saves, and how: ``model.config.vocab_size 50,257 is no multiple of 64: …``."""
    gain = padding.gain_seconds or 0.0
    return (
        f"{padding.setting} {padding.value:,} is no multiple of {padding.multiple}: padded to "
        f"{padding.padded_value:,}, it saves {seconds(gain)} a step ({percent(gain, step_seconds, 0)}); "
        f"{padding_advice(padding)}"
    )


def padding_advice(padding: Padding) -> str:
    """Return what to change in a training script so that a size is padded."""
    advice = {
        "vocab": f"a checkpoint: model.resize_token_embeddings(pad_to_multiple_of={padding.multiple})",
        "length": (
            f"tokenizer(..., padding=True, pad_to_multiple_of={padding.multiple}), or the collator's pad_to_multiple_of"
        ),
        "batch": f"a batch of {padding.padded_value} samples",
        "width": "possible only for a model trained from scratch: a checkpoint's width is fixed",
    }.get(padding.kind, "no setting of the workload has this size")
    if padding.factor > 1:
        return f"rows are {padding.factor} x {padding.value}: pad the {padding.value}; {advice}"
    return advice


FIRST_COLLECTIVE = "NCCL: what its first collective took outside of PyTorch's allocator."


def same_prediction(ranks: Sequence[int]) -> str:
    """Return a sentence on ranks that are shown with the prediction of rank 0."""
    which = f"Rank {ranks[0]} is" if len(ranks) == 1 else f"Ranks {ranks[0]} to {ranks[-1]} are"
    return f"{which} predicted as rank 0, which does the same."
