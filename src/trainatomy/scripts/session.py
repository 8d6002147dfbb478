"""A dry run: a simulated process with stand-ins, in which any code trains for a few steps."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from trainatomy.allocator.settings import AllocatorSettings
from trainatomy.catalog.versions import parse_version
from trainatomy.errors import TrainatomyError
from trainatomy.operators.allocation import allocation_rules
from trainatomy.operators.allocation.workspaces import WorkspaceTracker
from trainatomy.requests.scripts import ScriptRequest
from trainatomy.scripts import guard
from trainatomy.scripts.files import RedirectedFiles
from trainatomy.scripts.guard import guarded
from trainatomy.scripts.host_facts import ImportGrowth
from trainatomy.scripts.imports import ImportHook
from trainatomy.scripts.job import HandedOver
from trainatomy.scripts.launch import run_folder
from trainatomy.scripts.observer import ScriptObserver
from trainatomy.scripts.prediction import StepsAhead
from trainatomy.scripts.signals import ScriptSignals, StepsDone, Threads
from trainatomy.scripts.standins import (
    compiler,
    data,
    device_maps,
    flash_attention,
    foreign_files,
    generation,
    hub_files,
    machine,
    outside,
    pretrained,
    random_numbers,
    savers,
    tensors,
)
from trainatomy.scripts.standins.loaders import Loaders
from trainatomy.scripts.standins.notes import ALLOCATOR_VARIABLES, StandIns
from trainatomy.scripts.tasks import lightning, trainer
from trainatomy.scripts.tasks.planned import Tasks
from trainatomy.simulator.adapters.registry import adapters
from trainatomy.simulator.amd import check_amd
from trainatomy.simulator.cards import processor_of
from trainatomy.simulator.cudnn import installed_heuristics
from trainatomy.simulator.experts import grouped_mm_fallback
from trainatomy.simulator.isolation import isolated
from trainatomy.simulator.parallel.group import Topology
from trainatomy.simulator.process import SimulatedProcess
from trainatomy.training.process import forget_device

if TYPE_CHECKING:
    from trainatomy.catalog.gpus import GPU
    from trainatomy.simulator.adapters.adapter import Adapter

_APART = ("bitsandbytes",)
"""Libraries that look for CUDA's files when they are imported and find a GPU."""


_NO_WALL = (
    "this machine's kernel has no Landlock, or keeps it from this process: a library in C that writes a file or starts "
    "a program by itself is not kept from it"
)


class TimeIsUp(BaseException):
    """The time limit has passed; no ``except Exception`` of the script catches it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(ScriptRequest):
    """Settings with which a script is run: what was asked for, with ``compiles`` decided, and more.

    Three steps run by default: states exist from the second on, and the allocator's cache is stable in the third.

    Attributes:
        timed: Whether operations are written, for the time of a step.
        topology: The place of the process in a training on several GPUs.
        eager: Why ``torch.compile`` is not simulated, for a note; if it is, ``preload_compiler`` ran before.
        command: The script with its arguments; empty for a block of code.
        folder: Temporary folder of the run; None: the session makes one. Libraries may write to it.
        flash_attention: Whether the script names flash-attn, which is there then.
        part: Name of a folder in it for what the script writes.
    """

    timed: bool = True
    topology: Topology = field(default_factory=Topology)
    eager: str = ""
    command: tuple[str, ...] = ()
    folder: str | None = None
    flash_attention: bool = True
    part: str = "script"


class Session:
    """One dry run.

    Attributes:
        process: The simulated process.
        observer: What was seen of the loop.
        stand_ins: What stood in for something else.
        files: What the script would have written.
        signals: The signals of the loop.
        tasks: What the training does besides its steps.
        threads: The script's threads.
        tf32: Whether fp32 matrix products used tensor cores at the end; None where nothing was set.
        uses_trainer: Whether transformers' Trainer runs the loop.
        allocator: Settings of PyTorch's allocator that the script or the environment set.
        loaders: The script's DataLoaders.
        import_growth: What its imports added to this process.
    """

    def __init__(self, gpu: GPU, settings: Settings, script: str = "") -> None:
        self.gpu, self.settings, self.script = gpu, settings, script
        self.version = parse_version(settings.torch or torch.__version__)
        check_amd(gpu, self.version, settings.topology.world_size * settings.topology.devices)
        processor = processor_of(gpu, self.version, installed_heuristics(gpu))
        self.process = SimulatedProcess(
            gpu.device_name,
            gpu.memory_bytes,
            processor,
            allocation_rules(),
            WorkspaceTracker,
            settings.topology,
            allocator=self._allocator_settings,
        )
        self.process.recorder.operations.wanted = settings.timed
        self.observer = ScriptObserver(self.process, settings.steps, script, looks_ahead=settings.look_ahead)
        self.ahead = StepsAhead(self.observer, gpu.memory_bytes, looks_ahead=settings.look_ahead)
        self.signals = ScriptSignals(
            self.observer,
            settings.steps,
            check=self._check,
            goes_on=self.ahead.goes_on,
            plain_inside=bool(settings.compiles),
        )
        self.threads = Threads(self.process, (StepsDone, TimeIsUp, HandedOver, TrainatomyError))
        self.tf32: bool | None = None
        self.allocator = ""
        self.uses_trainer = False
        self.import_growth = ImportGrowth()
        self._began = time.monotonic()

    @contextlib.contextmanager
    def open(self) -> Iterator[Session]:
        """Run the block in the simulated process."""
        given = self.settings.folder
        folders = run_folder() if given is None else contextlib.nullcontext(given)
        with folders as folder, isolated(), contextlib.ExitStack() as stack:
            forget_device()
            stack.callback(forget_device)
            self.files = RedirectedFiles(folder, self.settings.part)
            stack.enter_context(self.process.open())
            torch.ones((1, 1)).to("cuda")  # a measurement begins so: with the context and the first segment
            self._install(stack, folder)
            stack.enter_context(self.threads.followed())
            stack.enter_context(self.observer.samples.attached())
            stack.enter_context(self.observer.longest.attached(self.signals.is_done))
            stack.enter_context(self.signals.attached())
            self._began = time.monotonic()
            try:
                yield self
            finally:
                self._look()

    def _install(self, stack: contextlib.ExitStack, folder: str) -> None:
        settings = self.settings
        imports = ImportHook(_APART, self.process.without_gpu, self.import_growth.around)
        self.stand_ins = StandIns(
            self.process,
            self.files,
            stack,
            imports,
            self.script,
            settings.command,
            settings.network,
            settings.samples,
            settings.lengths,
            settings.data,
            is_training=lambda: self.observer.has_trained,
        )
        stack.callback(setattr, self.stand_ins, "is_over", True)
        stack.enter_context(self.import_growth.following())
        stack.enter_context(imports.installed())
        temporary = os.path.join(folder, "tmp")  # noqa: PTH118
        os.makedirs(temporary, exist_ok=True)  # noqa: PTH103
        stack.enter_context(_temporary_folder(temporary))
        parts = (
            tensors,
            random_numbers,
            pretrained,
            device_maps,
            hub_files,
            data,
            generation,
            outside,
            savers,
            machine,
        )
        for part in parts:
            part.install(self.stand_ins)
        self.loaders = Loaders(self.stand_ins)
        flash_attention.install(self.stand_ins, is_named=settings.flash_attention)
        foreign_files.install(self.stand_ins)
        compiler.install(self.stand_ins, self.signals, settings.eager if not settings.compiles else None)
        self.tasks = Tasks(self.stand_ins, self.observer, self.signals, looks_ahead=settings.look_ahead)
        trainer.install(self.tasks)
        lightning.install(self.tasks)
        self._follow_autocast()
        self.stand_ins.when("transformers.trainer", self._follow_trainer)
        self.stand_ins.when("transformers.integrations.moe", self._spread_experts)
        for adapter in adapters():
            if adapter.modules:
                self.stand_ins.when(adapter.modules, partial(self._open, adapter))
        self._log_no_end()
        self.files.install(stack)
        own_process = settings.folder is not None
        if own_process and not guard.is_there():
            self.process.notes.append(_NO_WALL)
        stack.enter_context(guarded(self.files.is_ours, self.script, everywhere=own_process, network=settings.network))

    def _open(self, adapter: Adapter, *_: Any) -> None:
        """Let a library run that the script has imported."""
        self.stand_ins.stack.enter_context(adapter.simulated(self.process, None))

    def _follow_autocast(self) -> None:
        """Remember the dtype of autocast when a module's operations are cast."""
        autocast, original = self.process.autocast, self.process.autocast.cast

        def cast(*arguments: Any) -> Any:
            self.observer.autocast = torch.get_autocast_dtype("cuda")
            return original(*arguments)

        self.stand_ins.put(autocast, "cast", cast)

    def _spread_experts(self, _: Any) -> None:
        self.process.use_functions(grouped_mm_fallback())

    def _follow_trainer(self, module: Any) -> None:
        """Follow the turns of transformers' Trainer, and let it count no FLOP: that walks all parameters."""
        original = module.Trainer.training_step

        def training_step(*arguments: Any, **keywords: Any) -> Any:
            self.uses_trainer = True
            self.signals.loop_turns()
            return original(*arguments, **keywords)

        self.stand_ins.put(module.Trainer, "training_step", training_step)
        self.stand_ins.put(module.Trainer, "floating_point_ops", lambda trainer, inputs: 0)

    def _log_no_end(self) -> None:
        """Keep loops that log every exception (ignite's) from logging the end of the run as an error."""
        handle = logging.Logger.handle

        def handled(logger: logging.Logger, record: logging.LogRecord) -> None:
            if not isinstance(sys.exc_info()[1], StepsDone | TimeIsUp | HandedOver):
                handle(logger, record)

        self.stand_ins.put(logging.Logger, "handle", handled)

    def _look(self) -> None:
        """Note the state of the process at the end, before it is put back."""
        self.observer.look()
        with contextlib.suppress(RuntimeError):
            self.tf32 = bool(torch.backends.cuda.matmul.allow_tf32) or None
        self.allocator = _allocator_variable()

    def _allocator_settings(self) -> AllocatorSettings:
        """Return the settings of the allocator that the environment has now; PyTorch's own if it would refuse them."""
        try:
            return AllocatorSettings.parse(_allocator_variable(), self.version)
        except TrainatomyError:  # the prediction says so
            return AllocatorSettings(torch_version=self.version)

    def _check(self) -> None:
        """End the run when its time is up."""
        if time.monotonic() - self._began > self.settings.time_limit:
            raise TimeIsUp


def _allocator_variable() -> str:
    return next((os.environ[name] for name in ALLOCATOR_VARIABLES if os.environ.get(name)), "")


@contextlib.contextmanager
def _temporary_folder(folder: str) -> Iterator[None]:
    """Let temporary files of the block, also those of libraries in C, be made in ``folder``."""
    before = tempfile.tempdir
    tempfile.tempdir = os.environ["TMPDIR"] = folder  # the isolated process puts its variables back
    try:
        yield
    finally:
        tempfile.tempdir = before
