"""Predicts, without a GPU, what every part of GPU memory holds during a training step, to the byte.

Names are resolved when they are first used (PEP 562), so that ``import trainatomy`` loads neither torch nor
transformers nor pydantic.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainatomy.api import calibrate, compare, measure, ops, predict
    from trainatomy.catalog.architectures import architectures
    from trainatomy.catalog.gpus import find_gpu, gpus
    from trainatomy.errors import (
        DeviceError,
        DoesNotFit,
        FactoryError,
        MissingLibrary,
        NetworkError,
        SimulationError,
        TrainatomyError,
        WorkloadError,
    )
    from trainatomy.integrations.callback import AnatomyCallback
    from trainatomy.integrations.printing import print_gpu_utilization, print_summary
    from trainatomy.integrations.watch import Watch, watch
    from trainatomy.records.reading import diff, history, read_record
    from trainatomy.reporters.json import to_json
    from trainatomy.results.comparison import Comparison
    from trainatomy.results.measurement import Measurement
    from trainatomy.results.memory import Components, Memory
    from trainatomy.results.prediction import Prediction
    from trainatomy.workload.notebook import notebook
    from trainatomy.workload.reading import read as read_workload
    from trainatomy.workload.schema import Workload

__version__ = "0.1.0"

__all__ = [
    "AnatomyCallback",
    "Comparison",
    "Components",
    "DeviceError",
    "DoesNotFit",
    "FactoryError",
    "Measurement",
    "Memory",
    "MissingLibrary",
    "NetworkError",
    "Prediction",
    "SimulationError",
    "TrainatomyError",
    "Watch",
    "Workload",
    "WorkloadError",
    "__version__",
    "architectures",
    "calibrate",
    "compare",
    "diff",
    "find_gpu",
    "gpus",
    "history",
    "measure",
    "notebook",
    "ops",
    "predict",
    "print_gpu_utilization",
    "print_summary",
    "read_record",
    "read_workload",
    "to_json",
    "watch",
]

_HOMES = {
    **dict.fromkeys(("predict", "compare", "measure", "ops", "calibrate"), "api"),
    **dict.fromkeys([name for name in __all__ if name.endswith("Error")], "errors"),
    **dict.fromkeys(("DoesNotFit", "MissingLibrary"), "errors"),
    **dict.fromkeys(("Components", "Memory"), "results.memory"),
    "Measurement": "results.measurement",
    "Prediction": "results.prediction",
    **dict.fromkeys(("diff", "history", "read_record"), "records.reading"),
    **dict.fromkeys(("find_gpu", "gpus"), "catalog.gpus"),
    **dict.fromkeys(("Watch", "watch"), "integrations.watch"),
    **dict.fromkeys(("print_gpu_utilization", "print_summary"), "integrations.printing"),
    "AnatomyCallback": "integrations.callback",
    "Comparison": "results.comparison",
    "architectures": "catalog.architectures",
    "to_json": "reporters.json",
    "Workload": "workload.schema",
    "notebook": "workload.notebook",
    "read_workload": "workload.reading",
}
_NAMES_AT_HOME = {"read_workload": "read"}


def __getattr__(name: str) -> object:
    """Import the module that defines ``name``; raises ``AttributeError`` for what is not public."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(f"{__name__}.{_HOMES[name]}"), _NAMES_AT_HOME.get(name, name))
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
