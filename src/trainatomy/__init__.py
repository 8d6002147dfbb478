"""Predicts, without a GPU, what every part of GPU memory holds during a training step, to the byte.

Names are resolved when they are first used (PEP 562), so that ``import trainatomy`` loads neither torch nor
transformers nor pydantic.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainatomy.api import (
        calibrate,
        compare,
        compare_gpus,
        diagnose,
        fit,
        fit_gpus,
        measure,
        ops,
        predict,
        predict_in_detail,
        time_loader,
        why_out_of_memory,
    )
    from trainatomy.api.scripts import DryRun, dry_run, run_script
    from trainatomy.catalog.architectures import ArchitectureEntry, architectures
    from trainatomy.catalog.calibrations import Calibration
    from trainatomy.catalog.gpus import GPU, find_gpu, gpus
    from trainatomy.errors import (
        DeviceError,
        DoesNotFit,
        FactoryError,
        MissingLibrary,
        NetworkError,
        SimulationError,
        TrainatomyError,
        UnhealthyMachine,
        WorkloadError,
    )
    from trainatomy.integrations.callback import AnatomyCallback
    from trainatomy.integrations.printing import print_gpu_utilization, print_summary
    from trainatomy.integrations.watch import Watch, watch
    from trainatomy.records.reading import diff, history, read_record
    from trainatomy.reporters.html import to_html
    from trainatomy.reporters.json import to_json
    from trainatomy.results.comparison import Comparison, ComparisonRow
    from trainatomy.results.fit import Candidate, Fit, FitAcross, Shortage
    from trainatomy.results.loader import LoaderReport
    from trainatomy.results.machine import Diagnosis, Finding
    from trainatomy.results.measurement import Measurement
    from trainatomy.results.memory import Components, Memory
    from trainatomy.results.operations import OperationBreakdown
    from trainatomy.results.prediction import Fact, Prediction
    from trainatomy.results.record import Difference, History, Record
    from trainatomy.results.time import Time
    from trainatomy.results.trace import Detail
    from trainatomy.runs.comparison import ComparisonInterrupted
    from trainatomy.workload.builtin import notebook
    from trainatomy.workload.reading import read as read_workload
    from trainatomy.workload.schema import Workload

__version__ = "0.1.0"

__all__ = [
    "GPU",
    "AnatomyCallback",
    "ArchitectureEntry",
    "Calibration",
    "Candidate",
    "Comparison",
    "ComparisonInterrupted",
    "ComparisonRow",
    "Components",
    "Detail",
    "DeviceError",
    "Diagnosis",
    "Difference",
    "DoesNotFit",
    "DryRun",
    "Fact",
    "FactoryError",
    "Finding",
    "Fit",
    "FitAcross",
    "History",
    "LoaderReport",
    "Measurement",
    "Memory",
    "MissingLibrary",
    "NetworkError",
    "OperationBreakdown",
    "Prediction",
    "Record",
    "Shortage",
    "SimulationError",
    "Time",
    "TrainatomyError",
    "UnhealthyMachine",
    "Watch",
    "Workload",
    "WorkloadError",
    "__version__",
    "architectures",
    "calibrate",
    "compare",
    "compare_gpus",
    "diagnose",
    "diff",
    "dry_run",
    "find_gpu",
    "fit",
    "fit_gpus",
    "gpus",
    "history",
    "measure",
    "notebook",
    "ops",
    "predict",
    "predict_in_detail",
    "print_gpu_utilization",
    "print_summary",
    "read_record",
    "read_workload",
    "run_script",
    "time_loader",
    "to_html",
    "to_json",
    "watch",
    "why_out_of_memory",
]

_NAMES_BY_MODULE = {
    "api": (
        "calibrate",
        "compare",
        "compare_gpus",
        "diagnose",
        "fit",
        "fit_gpus",
        "measure",
        "ops",
        "predict",
        "predict_in_detail",
        "time_loader",
        "why_out_of_memory",
    ),
    "api.scripts": ("DryRun", "dry_run", "run_script"),
    "catalog.architectures": ("ArchitectureEntry", "architectures"),
    "catalog.calibrations": ("Calibration",),
    "catalog.gpus": ("GPU", "find_gpu", "gpus"),
    "errors": (
        "DoesNotFit",
        "MissingLibrary",
        "UnhealthyMachine",
        *(name for name in __all__ if name.endswith("Error")),
    ),
    "integrations.callback": ("AnatomyCallback",),
    "integrations.printing": ("print_gpu_utilization", "print_summary"),
    "integrations.watch": ("Watch", "watch"),
    "records.reading": ("diff", "history", "read_record"),
    "reporters.html": ("to_html",),
    "reporters.json": ("to_json",),
    "results.comparison": ("Comparison", "ComparisonRow"),
    "results.machine": ("Diagnosis", "Finding"),
    "results.trace": ("Detail",),
    "results.fit": ("Candidate", "Fit", "FitAcross", "Shortage"),
    "results.loader": ("LoaderReport",),
    "results.measurement": ("Measurement",),
    "results.memory": ("Components", "Memory"),
    "results.operations": ("OperationBreakdown",),
    "results.prediction": ("Fact", "Prediction"),
    "results.record": ("Difference", "History", "Record"),
    "results.time": ("Time",),
    "runs.comparison": ("ComparisonInterrupted",),
    "workload.builtin": ("notebook",),
    "workload.reading": ("read_workload",),
    "workload.schema": ("Workload",),
}
_MODULES = {name: module for module, names in _NAMES_BY_MODULE.items() for name in names}
_NAMES_IN_MODULE = {"read_workload": "read"}


def __getattr__(name: str) -> object:
    """Import the module that defines ``name``; raises ``AttributeError`` for other names."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(f"{__name__}.{_MODULES[name]}"), _NAMES_IN_MODULE.get(name, name))
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def load_ipython_extension(shell: object) -> None:
    """Register ``%%trainatomy`` (``%load_ext trainatomy``)."""
    import_module(f"{__name__}.integrations.notebook").load_ipython_extension(shell)
