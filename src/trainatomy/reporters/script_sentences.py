"""Sentences on a script that ran without a GPU: how it ended, what it trains, what stood in for the rest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from math import prod

from trainatomy.results.script import BatchLengths, Ending, Growth, ScriptRun, ScriptTask, StandIn, StandInKind
from trainatomy.units import human_bytes, many

_ENDINGS: dict[Ending, str] = {
    "steps": "was stopped after {steps}",
    "finished": "ended by itself after {steps}",
    "exit": "ended by sys.exit after {steps}",
    "error": "failed after {steps}; what it held until then is below",
    "interrupted": "was interrupted{place} after {steps}; what it held until then is below",
    "time limit": "reached the time limit{place} after {steps}; what it held until then is below",
}
_ENDED: dict[Ending, str] = {
    "error": "failed",
    "interrupted": "was interrupted",
    "time limit": "reached the time limit",
}
_MOST_WRITES = 5

_STAND_INS: dict[StandInKind, str] = {
    "command": "the command `{name}` was not run: it counts as successful and prints nothing",
    "computed values": "the script reads computed values ({name}), which do not exist without a GPU: numbers are 0; "
    "NaN, overflow and equal whole numbers are not found; other conditions are true. A branch that depends on them may "
    "differ on a GPU",
    "compiled": "torch.compile of {name} was left out: that ran eagerly. Compiled steps of four small models on an "
    "H200 (PyTorch 2.11) allocated 28 to 47 % less than eager ones in three cases, and 20 % more in one",
    "configuration": "the configuration of {name} comes from trainatomy's data: it is not in the cache on this machine",
    "data loader": "data are loaded in the script's own process",
    "data set": "the data set {name} is not on this machine: rows of its columns were made up, with texts of one "
    "length (--lengths), which decides the size of a batch that is padded to its longest",
    "generation": "generate() goes on to its maximum length: no sequence ends earlier, as the tokens are not known",
    "handover": "followed: {name}",
    "images": "the images of {name} are not on this machine: black ones of its size were made up",
    "launch": "{name}",
    "metric": "the metric {name} is not on this machine and computes nothing",
    "monitor": "{name} describes the simulated GPU: memory in use is what PyTorch has reserved, without the CUDA "
    "context; temperature, power and utilisation are those of an idle GPU",
    "out of memory": "the script handles errors of the GPU's memory ({name}) and may go on with less; a dry run raises "
    "none, so this is its first attempt",
    "notebook": "lines of the notebook for IPython or a shell were left out: {name}",
    "pretrained weights": "{name} was built from its configuration, without pretrained weights",
    "random numbers": "weights take more random numbers than are drawn here: what the host draws after them, such as "
    "the order of samples, differs from a run",
    "sample lengths": "samples have {name} tokens",
    "selection": "masks of computed values select everything, and all computed values differ ({times}): the most that "
    "x[mask], nonzero and unique can return",
    "tokenizer": "the tokenizer of {name} is not in the cache: one token for each word stands in",
    "torchscript": "torch.jit of {name} was left out: it runs eagerly; TorchScript may fuse operations, and hold less",
    "tracker": "{name} records nothing",
    "triton": "Triton kernels of {name} do nothing; their time is that of moving their tensors once",
}


def script_sentences(run: ScriptRun) -> list[str]:
    """Return everything there is to say about a script that ran."""
    return [*_what_ran(run), *map(stand_in, _one_of_reads(run.stand_ins)), *_writes(run)]


def _one_of_reads(stand_ins: tuple[StandIn, ...]) -> list[StandIn]:
    """Return the stand-ins, with one for all computed values that were read, in the place of the first."""
    reads = [one for one in stand_ins if one.kind == "computed values"]
    kinds = ", ".join(many(one.times, one.name.removesuffix("s")) for one in reads)
    joined = [replace(one, name=kinds, times=sum(each.times for each in reads)) for one in reads[:1]]
    return [one for each in stand_ins for one in (joined if each in reads[:1] else [each]) if each not in reads[1:]]


def ending(run: ScriptRun) -> str:
    """Return ``train.py --epochs 1 was stopped after 3 optimizer steps``."""
    kind = "optimizer step" if run.optimizers else "step"
    of_all = f" of {run.total_steps:,}" if run.total_steps is not None and run.total_steps > run.steps else ""
    steps = many(run.steps, kind) + of_all
    said = _ENDINGS[run.ending].format(steps=steps, place=f" at {run.place}" if run.place else "")
    return f"`{' '.join(run.command)}` {said}"


def _what_ran(run: ScriptRun) -> Iterator[str]:
    yield ending(run)
    if run.message:
        yield run.message
    if run.growth:
        yield _growth(run.growth)
    if run.lengths:
        yield _lengths(run.lengths)
    yield from map(_task, run.tasks)
    for model, count in Counter(run.models).items():
        frozen = "" if model.trainable_parameters == model.parameters else f", {model.trainable_parameters:,} trained"
        size = f"{model.parameters:,} parameters{frozen}, {human_bytes(model.bytes)} on the GPU"
        yield f"model {model.name}: {size}" if count == 1 else f"{count} models {model.name}, each: {size}"
    if not run.optimizers:
        yield "no optimizer stepped: steps are backward passes, and there are no optimizer states"
    for (name, steps), count in Counter((one.name, one.steps) for one in run.optimizers).items():
        states = sum(one.state_bytes for one in run.optimizers if (one.name, one.steps) == (name, steps))
        said = f"{many(steps, 'step')}, states of {human_bytes(states)}"
        yield f"optimizer {name}: {said}" if count == 1 else f"{count} optimizers {name}: {said} in all"


def fills_later(run: ScriptRun, room_bytes: int) -> str:
    """Return how a training that fits in its executed steps, with ``{needed}``, runs out of memory later; "" if not."""
    growth = run.growth
    if growth is not None and growth.fills_within(run.total_steps):
        length = "how many it trains is not known" if run.total_steps is None else f"it trains {run.total_steps:,}"
        return (
            f"fits for the first {many(run.steps, 'step')} ({{needed}}), then memory grows by "
            f"{human_bytes(growth.bytes_per_step)} a step: full after about {growth.steps:,} steps; {length}"
        )
    task = next((one for one in run.tasks if one.left_bytes > room_bytes), None)
    if task is None:
        return ""
    return (
        f"fits for {task.batches:,} of {task.of or 0:,} batches of the {task.kind} ({{needed}}); the others keep "
        f"{human_bytes(task.left_bytes)} more"
    )


def not_reached(run: ScriptRun) -> str:
    """Return what comes after the steps that were executed, and is not in the prediction; "" where nothing is known.

    Where a framework's configuration says what comes, that was executed.
    """
    if run.ending in ("finished", "exit"):
        return ""
    if (ended := _ENDED.get(run.ending)) is not None:
        return f"whatever follows step {run.steps}, after which it {ended}"
    left = [] if run.lengths is None or run.lengths.longest else [f"batches larger than {_shape(run.lengths.seen)}"]
    if run.total_steps is None and not run.tasks:
        return " and ".join([*left, f"whatever follows step {run.steps} (an evaluation, saving)"])
    left += [_when(task) for task in run.tasks if task.executed_after is None]
    left += [f"{_rest(task)} of the {task.kind}" for task in run.tasks if task.is_cut]
    return " and ".join(left)


def _lengths(lengths: BatchLengths) -> str:
    """Return how far the batches of the steps differ, and which sample was looked for."""
    said = f"batches differ in size: inputs of up to {_shape(lengths.seen)} in the steps"
    if lengths.longest is None:
        return f"{said}; larger ones were not reached: {lengths.reason}"
    of_all = f"{lengths.samples:,}" if lengths.read >= lengths.samples else f"{lengths.read:,} of {lengths.samples:,}"
    if prod(lengths.longest) <= prod(lengths.seen):
        return f"{said}, as large as with the longest of {of_all} samples"
    return f"{said}; a further step had the longest of {of_all} samples: {_shape(lengths.longest)}"


def _shape(shape: tuple[int, ...]) -> str:
    return " × ".join(f"{size:,}" for size in shape)


def _when(task: ScriptTask) -> str:
    """Return ``evaluation after step 64``."""
    return f"{task.kind} after {'the training' if task.after is None else f'step {task.after:,}'}"


def _rest(task: ScriptTask) -> str:
    """Return ``4,900 of 5,000 batches``, which were left out."""
    return f"{(task.of or 0) - task.batches:,} of {task.of:,} batches"


def _task(task: ScriptTask) -> str:
    """Return where a task was executed, or why it was not."""
    if task.executed_after is None:
        return f"{_when(task)}: not reached{f': {task.reason}' if task.reason else ''}"
    said = f"{task.kind}: executed after step {task.executed_after:,}"
    if task.after is not None and task.after > task.executed_after:
        said += f", as the script would after step {task.after:,}"
    if not task.batches:
        return said
    if task.of is None or task.of <= task.batches:
        return f"{said}: {task.batches:,} batch{'' if task.batches == 1 else 'es'}"
    rest = f"the others keep {human_bytes(task.left_bytes)} more" if task.is_cut else "the others show nothing new"
    return f"{said}: {task.batches:,} of {task.of:,} batches; {rest}"


def _growth(growth: Growth) -> str:
    """Return ``memory grows by 96 MiB with each step ...``."""
    made = f"{growth.operation} in {growth.module}" if growth.module else growth.operation
    return (
        f"memory grows by {human_bytes(growth.bytes_per_step)} with each step, so that this GPU is full after about "
        f"{growth.steps:,} steps: what {made} made stays. A list of losses or outputs holds their graphs, too: keep "
        "`loss.item()` or `tensor.detach().cpu()`"
    )


def stand_in(one: StandIn) -> str:
    """Return what stood in for something, with the script's line."""
    times = many(one.times, "time")
    said = _STAND_INS[one.kind].format(name=one.name, times=times)
    return f"{said} ({one.place})" if one.place else said


def _writes(run: ScriptRun) -> Iterator[str]:
    if run.writes:
        shown = ", ".join(run.writes[:_MOST_WRITES])
        more = len(run.writes) - _MOST_WRITES
        rest = f" and {many(more, 'other path')}" if more > 0 else ""
        yield f"not written: {shown}{rest}"
