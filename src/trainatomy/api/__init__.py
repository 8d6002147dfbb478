"""The library's functions: predict, fit, compare, measure, ops, calibrate, diagnose. They return values.

The functions with keywords are for users.  Those that take a request (``predict_training``, ``search_settings`` and
others) are for the command line, whose options are the fields of requests.

Names are resolved when they are first used (PEP 562), so that a prediction loads no search.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainatomy.api.comparing import compare, compare_gpus, measure_comparison, predict_comparison, predict_gpus
    from trainatomy.api.detailing import break_down, ops, predict_in_detail, predict_training_in_detail
    from trainatomy.api.fitting import (
        fit,
        fit_gpus,
        measure_fit,
        search_gpus,
        search_remedies,
        search_settings,
        why_out_of_memory,
    )
    from trainatomy.api.measuring import (
        calibrate,
        diagnose,
        load_dataset,
        look_at_machine,
        measure,
        measure_and_record,
        this_gpu,
        time_loader,
        time_loader_of,
    )
    from trainatomy.api.predicting import predict, predict_training
    from trainatomy.prediction.assemble import keep_executed
    from trainatomy.prediction.detail import detail_of_executed
    from trainatomy.runs.comparison import ComparisonInterrupted
    from trainatomy.runs.predicting import jobs_for

_NAMES_BY_MODULE = {
    "api.comparing": ("compare", "compare_gpus", "measure_comparison", "predict_comparison", "predict_gpus"),
    "api.detailing": ("break_down", "ops", "predict_in_detail", "predict_training_in_detail"),
    "api.fitting": (
        *("fit", "fit_gpus", "measure_fit", "search_gpus", "search_remedies", "search_settings"),
        "why_out_of_memory",
    ),
    "api.measuring": (
        *("calibrate", "diagnose", "load_dataset", "look_at_machine", "measure", "measure_and_record", "this_gpu"),
        *("time_loader", "time_loader_of"),
    ),
    "api.predicting": ("predict", "predict_training"),
    "prediction.assemble": ("keep_executed",),
    "prediction.detail": ("detail_of_executed",),
    "runs.comparison": ("ComparisonInterrupted",),
    "runs.predicting": ("jobs_for",),
}
_MODULES = {name: f"trainatomy.{module}" for module, names in _NAMES_BY_MODULE.items() for name in names}
__all__ = [
    "ComparisonInterrupted",
    "break_down",
    "calibrate",
    "compare",
    "compare_gpus",
    "detail_of_executed",
    "diagnose",
    "fit",
    "fit_gpus",
    "jobs_for",
    "keep_executed",
    "load_dataset",
    "look_at_machine",
    "measure",
    "measure_and_record",
    "measure_comparison",
    "measure_fit",
    "ops",
    "predict",
    "predict_comparison",
    "predict_gpus",
    "predict_in_detail",
    "predict_training",
    "predict_training_in_detail",
    "search_gpus",
    "search_remedies",
    "search_settings",
    "this_gpu",
    "time_loader",
    "time_loader_of",
    "why_out_of_memory",
]


def __getattr__(name: str) -> object:
    """Import the module that defines ``name``; raises ``AttributeError`` for other names."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
