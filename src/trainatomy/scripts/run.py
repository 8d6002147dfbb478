"""Run a script in a simulated process until its steps are done, and say what came of it."""

from __future__ import annotations

import gc
import re
import signal
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from trainatomy.catalog.calibrations import resolve_calibration
from trainatomy.catalog.files import read_yaml
from trainatomy.catalog.gpus import find_gpu
from trainatomy.errors import FactoryError, MissingLibrary, SimulationError, TrainatomyError, WorkloadError
from trainatomy.libraries import version_of
from trainatomy.prediction.assemble import keep_executed
from trainatomy.prediction.detail import detail_of_executed
from trainatomy.requests.predicting import PredictRequest
from trainatomy.requests.scripts import ScriptRequest
from trainatomy.results.script import Ending, StandIn
from trainatomy.scripts.imports import files_of
from trainatomy.scripts.job import INTERRUPTED, HandedOver, Job, Outcome, any_place_of, place_of
from trainatomy.scripts.notebook import SUFFIX, read_notebook, source_of
from trainatomy.scripts.prediction import prediction_of_script, run_of
from trainatomy.scripts.programs import is_installed
from trainatomy.scripts.session import Session, Settings, TimeIsUp
from trainatomy.scripts.signals import StepsDone
from trainatomy.scripts.standins.flash_attention import names_flash_attention
from trainatomy.simulator.parallel.group import Topology
from trainatomy.simulator.placement import NO_DATA

if TYPE_CHECKING:
    from trainatomy.scripts.command import Command

_PACKAGES = {
    "PIL": "pillow",
    "bs4": "beautifulsoup4",
    "cv2": "opencv-python-headless",
    "dotenv": "python-dotenv",
    "google": "protobuf",
    "gym": "gymnasium",
    "skimage": "scikit-image",
    "sklearn": "scikit-learn",
    "yaml": "pyyaml",
}
"""Names under which libraries are installed, where they are imported by other names."""
_HANDLERS = re.compile(r"\b(OutOfMemoryError|find_executable_batch_size|auto_find_batch_size|auto_scale_batch_size)\b")
"""Names by which scripts, accelerate, transformers' Trainer and Lightning try a smaller batch."""
_LONGEST = 600
"""Characters of a message that are kept."""


@dataclass(frozen=True, slots=True)
class _End:
    """The end of a script: its kind, the error to report if there is one, and its line in the script."""

    ending: Ending
    error: TrainatomyError | None = None
    place: str = ""


def run_job(job: Job, gpu_id: str, *, is_last: bool = False, eager: str = "", folder: str | None = None) -> Outcome:
    """Run a job's script on one of its GPUs, in this process.

    Args:
        job: The script, with ``compiles`` decided.
        gpu_id: One of its GPUs.
        is_last: The process has nothing else to do: once the script has ended, Ctrl-C does nothing until its bill is
            written.
        eager: Why nothing is compiled, where that was not asked for.
        folder: Temporary folder of the run; None: one is made.
    """
    started = time.perf_counter()
    gpu = find_gpu(gpu_id)
    file = job.command.file()
    asked = {each.name: getattr(job, each.name) for each in fields(ScriptRequest)}
    asked["data"] = None if job.data is None else str(Path(job.data).resolve())
    settings = Settings(
        **asked,
        timed=job.timed,
        topology=topology_of(job.command),
        eager=eager,
        command=(*(("-m",) if job.command.is_module else ()), job.command.target, *job.command.arguments),
        folder=folder,
        flash_attention=names_flash_attention(job.command.arguments, files_of(file)),
        part=job.gpus[0] if job.handovers else gpu_id,  # what the commands before wrote is found on every GPU
    )
    session = Session(gpu, settings, "" if job.command.entry() else str(file))
    try:
        with session.open():
            for handover in job.handovers:
                session.stand_ins.note("handover", handover.text)
            end = _end(session, job, is_last)
    except HandedOver as error:
        return Outcome(gpu_id, handover=error.handover)
    if is_last:
        gc.disable()  # to search millions of events for garbage, again and again, takes longer than to analyse them
    message = "" if end.error is None else str(end.error)
    code = INTERRUPTED if end.ending == "interrupted" else 0
    code = code if end.error is None else end.error.exit_code
    seen = session.observer
    if seen.steps == 0 or (end.error is not None and not (seen.models or seen.optimizers)):
        return Outcome(gpu_id, None, message or _nothing(session, job, end), code or WorkloadError.exit_code)
    code = 0 if end.error is None else code
    run = run_of(session, job.typed or job.command.typed, end.ending, message, end.place)
    handler = handler_of_memory(file, job.command.arguments)
    calibration = resolve_calibration(job.calibration)
    request = PredictRequest(
        timeline=job.timeline,
        timed=job.timed,
        calibration=calibration,
        host_memory=job.host_memory,
        dataset_memory=job.dataset_memory,
    )
    with keep_executed() as executed:
        prediction = prediction_of_script(session, run, job.command.name, request, started)
    if handler and prediction.out_of_memory is not None and prediction.script is not None:
        handles = StandIn("out of memory", handler)
        run = replace(prediction.script, stand_ins=(handles, *prediction.script.stand_ins))
        prediction = replace(prediction, script=run)
    detail = None
    if job.detail:
        detail = detail_of_executed(executed[-1], calibration, timed=prediction.time is not None)
    return Outcome(gpu_id, prediction, message, code, detail=detail)


def handler_of_memory(file: Path, arguments: Sequence[str]) -> str:
    """Return the name by which a script, or a library at its wish, handles that memory runs out; "" if it does not."""
    texts = [*arguments, *map(source_of, files_of(file))]
    found = (match[0] for text in texts for match in _HANDLERS.finditer(text))
    return next(found, "")


def topology_of(command: Command) -> Topology:
    """Return the place of the simulated process: rank 0 of those that the launcher starts."""
    launch = command.launch
    if launch is None:
        return Topology()
    # accelerate starts a process that is alone without a launcher, unless FSDP or DeepSpeed needs a group
    is_plain = command.launcher[:1] == ("accelerate",) and launch.fsdp is None and launch.deepspeed is None
    return Topology(0, launch.gpus * launch.nodes, launch.gpus, is_launched=not is_plain)


def _end(session: Session, job: Job, is_last: bool) -> _End:
    """Run the script, and return how it ended."""
    command = job.command
    file = command.file()
    if file.suffix == SUFFIX and (left_out := read_notebook(file).left_out):
        session.stand_ins.note("notebook", ", ".join(f"`{line}`" for line in left_out))
    try:
        with _interruptible(is_last), _limited(session):
            command.execute()
    except StepsDone:
        return _End("steps")
    except TimeIsUp as error:
        return _End("time limit", place=any_place_of(error))
    except KeyboardInterrupt as error:
        return _End("interrupted", place=any_place_of(error))
    except SystemExit as error:
        return _exit(session, error)
    except HandedOver:
        raise
    except TrainatomyError as error:
        return _End("error", _at_place(error), place_of(error))
    except BaseException as error:
        if job.debug:
            traceback.print_exception(error)
        return _End("error", explained(error, command.name), place_of(error))
    finally:
        gc.collect()
    if message := session.observer.only_on_the_cpu():
        return _End("error", SimulationError(message))
    if session.threads.failed is not None and not session.observer.steps:
        failed = session.threads.failed
        return _End("error", explained(failed, command.name), place_of(failed))
    return _End("finished")


def _at_place(error: TrainatomyError) -> TrainatomyError:
    """Return an error of ours in the words of a script, with its line."""
    place = place_of(error)
    text = str(error).replace("`trainatomy measure`", "`trainatomy run --measure`")
    located = TrainatomyError(text if not place or place in text else f"{place}: {text}")
    located.exit_code = error.exit_code
    return located


@contextmanager
def _interruptible(is_last: bool) -> Iterator[None]:
    """Let Ctrl-C interrupt the block, and with ``is_last`` do nothing after it."""
    if not is_last:
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


@contextmanager
def _limited(session: Session) -> Iterator[None]:
    """Raise ``TimeIsUp`` in the block at the time limit, wherever the script is, or what ended it in a thread.

    It is raised again every second, as a bare ``except:`` of the script may catch it.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    def time_is_up(*_: object) -> None:
        raise session.threads.ending or TimeIsUp

    before = signal.signal(signal.SIGALRM, time_is_up)
    signal.setitimer(signal.ITIMER_REAL, session.settings.time_limit, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _exit(session: Session, error: SystemExit) -> _End:
    """Return how a script ended by ``sys.exit``; before any step, or with a code, that is an error."""
    failed = error.code not in (None, 0)
    if not failed and session.observer.steps:
        return _End("exit")
    place = place_of(error)
    said = f": {error.code}" if failed else ""
    where = f" at {place}" if place else ""
    steps = session.observer.steps
    after = f"after {steps} step{'s' if steps > 1 else ''}" if steps else "before its first step"
    return _End("exit", FactoryError(f"the script called sys.exit{where} {after}{said}"), place)


def explained(error: BaseException, name: str) -> TrainatomyError:
    """Return the error to report for an exception of a script."""
    place = place_of(error) or name
    while isinstance(error, ImportError) and error.__cause__ is not None:  # modules that import lazily hide what failed
        error = error.__cause__
    text = (str(error).strip() or "no message")[:_LONGEST]
    if isinstance(error, SyntaxError):
        return FactoryError(f"{place} raised {type(error).__name__}: {error.msg}")
    if isinstance(error, ModuleNotFoundError) and error.name:
        top = error.name.partition(".")[0]
        instead = read_yaml("cuda_only.yaml").get(top)
        if instead is not None:
            return SimulationError(
                f"{place} needs {error.name}, a package of CUDA kernels that are not simulated: {instead}.\n"
                "Or measure the script: trainatomy run --measure"
            )
        package = _PACKAGES.get(top, top)
        if top != error.name and is_installed(top):
            release = f"{package} {version_of(package) or ''}".rstrip()
            return MissingLibrary(
                f"{place} needs {error.name}, which the installed {release} does not have: install the release that "
                "it was written for",
                library=top,
            )
        return MissingLibrary(f"{place} needs {top}, which is not installed: pip install {package}", library=top)
    if isinstance(error, PermissionError) or "ermission denied" in text:
        return SimulationError(
            f"{place} raised {type(error).__name__}: {text}\n"
            "In a dry run only Python's functions write, to a temporary folder: code in C neither writes, nor starts "
            "programs, nor uses the network (--network)"
        )
    if "device" in text and ("same device" in text or "meta" in text) and isinstance(error, RuntimeError):
        return SimulationError(
            f"{place} computes with tensors of the CPU and of the GPU (or with a model's weights on the CPU): {text}\n"
            "On a GPU this fails if one of them is there; weights have no values in a dry run, so nothing can be "
            "computed with them on the CPU"
        )
    if "fake impl" in text:
        return SimulationError(
            f"{place} calls an operator of an extension without a kernel for meta tensors: {text.partition('. ')[0]}.\n"
            "Register one (torch.library.register_fake), or measure the script: trainatomy run --measure"
        )
    if "env:// rendezvous" in text:
        return FactoryError(
            f"{place} joins a group of processes, which a launcher describes: say how many GPUs it has, "
            f"trainatomy run --gpus N, or give the whole command, trainatomy run torchrun ... ({text})"
        )
    if isinstance(error, NotImplementedError) and "have no storage" in text:
        return SimulationError(
            f"{place} takes a tensor to the GPU that is not dense ({text}); sparse and nested tensors there are not "
            "simulated.\nMeasure the script: trainatomy run --measure"
        )
    if NO_DATA in text:
        return FactoryError(
            f"{place} moves a model some of whose weights accelerate's hooks keep in host memory (device_map, "
            f"cpu_offload): PyTorch raises {type(error).__name__}, on a GPU as here ({text}).\n"
            "Leave it where it is, or give device_map a max_memory that takes all of it"
        )
    if isinstance(error, NotImplementedError) and "meta" in text:
        return SimulationError(f"{place} needs values that do not exist without a GPU: {text}")
    if isinstance(error, EOFError):
        return SimulationError(f"{place} asks for input, and nobody answers in a dry run; pass it as an argument")
    if any(map(_is_of_network, _with_causes(error))):
        return WorkloadError(
            f"{place} needs the network: {type(error).__name__}: {text}\n"
            "Switch it on with --network, or load what it asks for into the cache before"
        )
    return FactoryError(f"{place} raised {type(error).__name__}: {text}")


def _with_causes(error: BaseException | None) -> Iterator[BaseException]:
    """Return an error and those it was raised from."""
    while error is not None:
        yield error
        error = error.__cause__


def _is_of_network(error: BaseException) -> bool:
    """Return whether an error says that something cannot be reached."""
    if type(error) is TimeoutError or (isinstance(error, ConnectionError) and not isinstance(error, BrokenPipeError)):
        return True
    return "network is off" in str(error) or "offline" in str(error).lower()


def _nothing(session: Session, job: Job, end: _End) -> str:
    """Return why there is nothing to predict."""
    name = job.command.name
    where = f" (it was at {end.place})" if end.place else ""
    if end.ending == "time limit":
        return f"{name} did not complete an optimizer step within {job.time_limit:g} s (--time-limit){where}"
    if end.ending == "interrupted":
        return f"{name} was interrupted before its first optimizer step was complete{where}"
    seen = session.observer
    if seen.called_models:
        return (
            f"{name} ended without an optimizer step, though it called {', '.join(seen.called_models[:3])}: it trains "
            "nothing, or only with other arguments.\nPass the arguments with which it trains"
        )
    return (
        f"{name} ended without training: no module with parameters was called.\n"
        "Name the script that trains, with the arguments with which it trains"
    )
