"""Predicts, without a GPU, what every part of GPU memory holds during a training step, to the byte.

``import trainatomy`` loads neither torch nor transformers nor pydantic: names are imported when they are first used.
"""

from __future__ import annotations

from importlib import import_module

from trainatomy.lazy import lazy

__version__ = "0.1.0"

NAMES = {
    "api": "calibrate, compare, compare_gpus, diagnose, dry_run, fit, fit_gpus, measure, ops, predict, "
    "predict_in_detail, run_script, time_loader, why_out_of_memory, ComparisonInterrupted, DryRun",
    "catalog.architectures": "architectures, ArchitectureEntry",
    "catalog.calibrations": "Calibration",
    "catalog.gpus": "find_gpu, gpus, GPU",
    "errors": "DeviceError, DoesNotFit, FactoryError, MissingLibrary, NetworkError, SimulationError, TrainatomyError, "
    "UnhealthyMachine, WorkloadError",
    "integrations.callback": "AnatomyCallback",
    "integrations.printing": "print_gpu_utilization, print_summary",
    "integrations.watch": "watch, Watch",
    "records.reading": "diff, history, read_record",
    "reporters.html": "to_html",
    "reporters.json": "to_json",
    "results.comparison": "Comparison, ComparisonRow",
    "results.fit": "Candidate, Fit, FitAcross, Shortage",
    "results.loader": "LoaderReport",
    "results.machine": "Diagnosis, Finding",
    "results.measurement": "Measurement",
    "results.memory": "Components, Memory",
    "results.operations": "OperationBreakdown",
    "results.prediction": "Fact, Prediction",
    "results.record": "Difference, History, Record",
    "results.time": "Time",
    "results.trace": "Detail",
    "workload.builtin": "notebook",
    "workload.reading": "read as read_workload",
    "workload.schema": "Workload",
}
"""Public names by the module that has them."""
__getattr__, __dir__, _names = lazy(__name__, NAMES)
__all__ = ["__version__", *_names]


def load_ipython_extension(shell: object) -> None:
    """Register ``%%trainatomy`` (``%load_ext trainatomy``)."""
    import_module(f"{__name__}.integrations.notebook").load_ipython_extension(shell)
