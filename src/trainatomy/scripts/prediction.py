"""The prediction of a script: what was seen of it as a workload, and the same analysis.

Steps beyond those that were asked for, where they decide what comes later.

A later batch may hold the longest sample of the data set (``longest.py``).  Memory that has grown in each step may go
on growing, or be a loader that fills its queue: further steps show which; a queue of a limited length says itself how
much it will take.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections import Counter, deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from trainatomy.allocator.blocks import block_bytes
from trainatomy.analysis.epochs import Place, growth_of, live_bytes, place_of
from trainatomy.errors import WorkloadError
from trainatomy.prediction.assemble import prediction_of
from trainatomy.prediction.host import checked_bill
from trainatomy.prediction.host_facts import limits_of
from trainatomy.requests.predicting import PredictRequest
from trainatomy.results.script import MANY_STEPS, Ending, ScriptRun
from trainatomy.scripts.host_facts import host_facts_of
from trainatomy.scripts.longest import batch_tensors
from trainatomy.simulator.amd import amd_notes
from trainatomy.simulator.notes import version_notes
from trainatomy.simulator.releases import part_notes
from trainatomy.simulator.run_notes import host_memory_notes, plan_notes, run_notes, trial_notes
from trainatomy.simulator.simulation import Simulation
from trainatomy.simulator.steps import with_further_steps
from trainatomy.simulator.storages import storage_of
from trainatomy.units import human_bytes
from trainatomy.workload.schema import Workload

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from trainatomy.results.prediction import Prediction
    from trainatomy.scripts.observer import ScriptObserver
    from trainatomy.scripts.session import Session
    from trainatomy.simulator.recorder import Recorder


FURTHER_STEPS = 2
"""Steps that show whether memory goes on growing."""
_SLOWLY = 1000
"""Steps from which on it grows so slowly that it may be a pool of samples that is filled, such as that of a GAN."""
_MOST_STEPS = 64
_SECONDS = 15.0
"""Further steps that show whether it goes on growing slowly, and the time for them."""


class StepsAhead:
    """Decides whether a loop goes on after its steps are over.

    Args:
        observer: Observer of the loop.
        gpu_bytes: Memory of the GPU.
        looks_ahead: False: it never does.

    Attributes:
        filling: What queues of a limited length will yet take, by what made their entries, where memory has grown.
    """

    def __init__(self, observer: ScriptObserver, gpu_bytes: int, *, looks_ahead: bool) -> None:
        self._observer = observer
        self._gpu_bytes = gpu_bytes
        self._looks_ahead = looks_ahead
        self._steps = 0
        self._began = 0.0
        self.filling: dict[Place, int] = {}

    def goes_on(self) -> bool:
        """Return whether another step is executed; called when one is about to begin after all that were asked for."""
        if not self._looks_ahead:
            return False
        if not self._observer.longest.goes_on() and not self._may_grow():
            return False
        self._observer.go_ahead()
        return True

    def _may_grow(self) -> bool:
        """Return whether memory has grown in the last steps, and a further one shows whether it goes on."""
        self._began = self._began or time.monotonic()
        is_late = time.monotonic() - self._began > _SECONDS
        if self._steps >= _MOST_STEPS or (self._steps >= FURTHER_STEPS and is_late):
            return False
        trace = self._observer.recorder.trace
        if growth_of(trace, 0) is None:
            return False
        room = self._gpu_bytes - live_bytes(trace)
        self.filling = _filling(self._observer.recorder)
        growth = growth_of(trace, room, self.filling)
        if growth is None:
            return False
        left = room // growth.bytes_per_step
        if self._steps >= FURTHER_STEPS and not _SLOWLY < left < MANY_STEPS:
            return False
        self._steps += 1
        gc.collect()  # what only waits for Python's collector is no growth
        return True


def _filling(recorder: Recorder) -> dict[Place, int]:
    """Return the bytes that queues of a limited length take until they are full, by what made their last entries."""
    found = Counter[Place]()
    for queue in gc.get_objects():
        if issubclass(type(queue), deque) and queue and queue.maxlen is not None:
            left = queue.maxlen - len(queue)
            for tensor in batch_tensors(queue[-1]):
                if left and (number := recorder.number_of(tensor)) is not None:
                    size = block_bytes(storage_of(tensor).nbytes(), ())
                    found[place_of(recorder.trace.origins[number])] += left * size
    return dict(found)


def _filling_notes(filling: Mapping[Place, int]) -> Iterator[str]:
    if filling:
        yield (
            "the script fills queues of a limited length (collections.deque) with tensors on the GPU; when they are "
            f"full, {human_bytes(sum(filling.values()))} more are held than after the steps here"
        )


_PRECISIONS = {torch.float16: "fp16", torch.bfloat16: "bf16"}


def run_of(session: Session, command: tuple[str, ...], ending: Ending, message: str = "", place: str = "") -> ScriptRun:
    """Return what a dry run saw of a script."""
    seen = session.observer
    return ScriptRun(
        command=command,
        ending=ending,
        steps=seen.steps,
        models=seen.models,
        optimizers=seen.optimizers,
        stand_ins=session.stand_ins.listed(),
        writes=tuple(session.files.writes),
        message=message,
        place=place,
        counted="batches" if seen.samples.in_step(max(1, seen.micro_steps)) is None else "samples",
        tasks=session.tasks.listed(),
        total_steps=session.tasks.total_steps,
        lengths=seen.longest.lengths(),
    )


def workload_of(session: Session, name: str) -> Workload:
    """Return a workload that says what was seen of a script: the basis of its times and of its rule of thumb."""
    seen, train = session.observer, dict[str, Any]()
    micro_steps = max(1, seen.micro_steps)
    samples = seen.samples.in_step(micro_steps) or micro_steps  # a batch counts where nobody knows how many it has
    is_even = samples % micro_steps == 0
    train["per_device_train_batch_size"] = samples // micro_steps if is_even else samples
    train["gradient_accumulation_steps"] = micro_steps if is_even else 1
    if seen.autocast in _PRECISIONS:
        train[_PRECISIONS[seen.autocast]] = True
    if session.tf32 is not None:
        train["tf32"] = session.tf32
    if seen.optimizer_class is not None:
        train["optim"] = f"{seen.optimizer_class.__module__}.{seen.optimizer_class.__qualname__}"
    model = {"class": seen.models[0].name if seen.models else "model", "dtype": _dtype(seen.dtype)}
    topology = session.settings.topology
    mapping: dict[str, Any] = {
        "name": name,
        "loop": "trainer" if session.uses_trainer else "pytorch",
        "model": model,
        "gpu": session.gpu.id,
        "train": train,
    }
    if session.allocator:
        mapping["allocator"] = session.allocator
    if topology.world_size > 1:
        parallel: dict[str, Any] = {"gpus": topology.gpus_per_node}
        parallel["nodes"] = topology.world_size // topology.gpus_per_node
        mapping["parallel"] = parallel
        strategy = seen.strategy or ""
        if strategy.startswith("deepspeed"):
            mapping["loop"] = "trainer"
            stage = {"stage": int(strategy.removeprefix("deepspeed"))}
            train["deepspeed"] = {"train_micro_batch_size_per_gpu": "auto", "zero_optimization": stage}
        elif strategy and session.uses_trainer:
            train |= {"fsdp": True, "fsdp_config": {"version": int(strategy.removeprefix("fsdp"))}}
        elif strategy:
            parallel["strategy"] = strategy
    sizes = ("per_device_train_batch_size", "gradient_accumulation_steps")
    # a class without a name; what workloads refuse; all but the sizes; sizes that no GPU has
    for dropped in ((), ("optim",), ("tf32",), ("fp16", "bf16"), train.keys() - sizes):
        with contextlib.suppress(WorkloadError):
            kept = {key: value for key, value in train.items() if key not in dropped}
            return Workload.from_mapping({**mapping, "train": kept})
    return Workload.from_mapping({**mapping, "train": {}})


_DISTRIBUTED = ("torch.distributed",)


def _evaluation_notes(seen: ScriptObserver) -> Iterator[str]:
    """Yield a note where a model was evaluated before every step but the first, perhaps for what the step learns."""
    if seen.steps > 1 and seen.evaluated_before.issuperset(range(1, seen.steps)):
        yield (
            "between all steps a model that trains is called in eval mode and without gradients: this counts as "
            "evaluation, so its memory is in the peak, and its time is in no step. If the steps learn from what it "
            "generates, add the time of these calls"
        )


def _sample_notes(run: ScriptRun) -> Iterator[str]:
    """Yield a note where nobody knows how many samples a step has."""
    if run.counted == "batches":
        yield (
            "how many samples a step has is not known: no DataLoader fetched them, and the shapes of the model's "
            "inputs do not agree. Batches are counted in their place"
        )


def _dtype(dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    return name if name in ("float16", "bfloat16") else "float32"


def prediction_of_script(
    session: Session, run: ScriptRun, name: str, request: PredictRequest, started: float
) -> Prediction:
    """Return the prediction for what a script did until it ended; ``request``: what is asked for, if it can be."""
    seen, recorder = session.observer, session.process.recorder
    operations = seen.end()
    recorder.end_run()
    workload = workload_of(session, name)
    timed = request.timed and bool(operations.operations) and seen.steps > 0
    goes_on = run.ending == "steps"
    trace = with_further_steps(recorder.trace, session.process.allocator()) if goes_on else recorder.trace
    library = session.process.processor.cudnn
    cudnn = None if library is None else library.version
    simulation = Simulation(
        trace=trace,
        parameters=sum(model.parameters for model in run.models),
        trainable_parameters=sum(model.trainable_parameters for model in run.models),
        steps=seen.steps,
        torch_version=session.version,
        libraries=frozenset({"kernels", "training"}) | recorder.loaded,
        stack_bytes=recorder.stack_bytes,
        notes=(
            *version_notes(session.version, session.gpu.capability),
            *amd_notes(session.gpu, {call.name for call in session.process.recorder.operations.operations.calls}),
            *part_notes(session.version, _DISTRIBUTED if session.settings.topology.world_size > 1 else ()),
            *trial_notes(recorder.trace.trials, known=session.process.processor.cudnn is not None),
            *plan_notes(operations.calls, cudnn),
            *run_notes(recorder),
            *_evaluation_notes(seen),
            *_sample_notes(run),
            *session.process.notes,
            *_filling_notes(session.ahead.filling),
            *host_memory_notes(session.process.storages.host_memory),
        ),
        operations=operations,
        tokens_per_sample=seen.samples.tokens_of_sample(max(1, seen.micro_steps)),
        trials=len(recorder.trace.trials),
        weights_dtype=_dtype(seen.dtype),
        models=tuple(dict.fromkeys(model.name for model in run.models)),
        attention=seen.attention,
        stored_quantization=seen.quantization,
        loop=None if session.uses_trainer else "script",
        cudnn=cudnn,
        communicators={ranks: frozenset(kinds) for ranks, kinds in recorder.groups.items()},
        communicator_copies={ranks: len(names) for ranks, names in recorder.group_names.items() if len(names) > 1},
    )
    found = prediction_of(workload, simulation, replace(request, timed=timed), started)
    facts = host_facts_of(session, run, request.dataset_memory or 0, found.room_bytes)
    found = replace(found, host_bill=checked_bill(facts, limits_of(workload, request)))
    if run.ending not in ("finished", "exit"):
        run = replace(run, growth=growth_of(recorder.trace, found.room_bytes, session.ahead.filling))
    if found.fits and run.fills(found.room_bytes):
        found = replace(found, fits=False, verdict="does not fit")
    if found.subject is not None:  # a workload names neither several optimizers nor classes of the script
        names = " + ".join(dict.fromkeys(one.name for one in run.optimizers)) or None
        found = replace(found, subject=replace(found.subject, optimizer=names))
    return replace(found, script=run, seconds_taken=time.perf_counter() - started)
