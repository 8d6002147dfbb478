"""The library's functions: predict, fit, compare, measure, ops, calibrate, diagnose. They return values.

The functions with keywords are for users.  Those that take one value of options (``predict_comparison``,
``search_settings`` and others) are for the command line, which has checked its own.

Names are resolved when they are first used (PEP 562), so that a prediction loads no search.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainatomy.api.comparing import compare, compare_gpus, measure_comparison, predict_comparison, predict_gpus
    from trainatomy.api.detailing import ops, predict_in_detail
    from trainatomy.api.fitting import (
        SearchRequest,
        fit,
        fit_gpus,
        measure_fit,
        search_gpus,
        search_remedies,
        search_settings,
        why_out_of_memory,
    )
    from trainatomy.api.measuring import calibrate, diagnose, measure, measure_and_record, this_gpu, time_loader
    from trainatomy.api.predicting import Batch, predict

__all__ = [
    "Batch",
    "SearchRequest",
    "calibrate",
    "compare",
    "compare_gpus",
    "diagnose",
    "fit",
    "fit_gpus",
    "measure",
    "measure_and_record",
    "measure_comparison",
    "measure_fit",
    "ops",
    "predict",
    "predict_comparison",
    "predict_gpus",
    "predict_in_detail",
    "search_gpus",
    "search_remedies",
    "search_settings",
    "this_gpu",
    "time_loader",
    "why_out_of_memory",
]

_NAMES_BY_MODULE = {
    "comparing": ("compare", "compare_gpus", "measure_comparison", "predict_comparison", "predict_gpus"),
    "detailing": ("ops", "predict_in_detail"),
    "fitting": (
        "SearchRequest",
        "fit",
        "fit_gpus",
        "measure_fit",
        "search_gpus",
        "search_remedies",
        "search_settings",
        "why_out_of_memory",
    ),
    "measuring": ("calibrate", "diagnose", "measure", "measure_and_record", "this_gpu", "time_loader"),
    "predicting": ("Batch", "predict"),
}
_MODULES = {name: f"trainatomy.api.{module}" for module, names in _NAMES_BY_MODULE.items() for name in names}


def __getattr__(name: str) -> object:
    """Import the module that defines ``name``; raises ``AttributeError`` for other names."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
