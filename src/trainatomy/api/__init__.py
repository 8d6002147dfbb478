"""The library's functions: predict, fit, compare, measure, ops, calibrate, diagnose. They return values.

The functions with keywords are for users.  Those that take one value of options (``predict_comparison``,
``search_settings`` and others) are for the command line, which has checked its own.
"""

from __future__ import annotations

from trainatomy.api.comparing import compare, compare_gpus, measure_comparison, predict_comparison, predict_gpus
from trainatomy.api.detailing import predict_in_detail
from trainatomy.api.diagnosing import diagnose
from trainatomy.api.fitting import fit, fit_gpus, measure_fit, why_out_of_memory
from trainatomy.api.keywords import Batch
from trainatomy.api.loading import time_loader
from trainatomy.api.measuring import calibrate, measure, measure_and_record, this_gpu
from trainatomy.api.operations import ops
from trainatomy.api.predicting import predict
from trainatomy.api.searching import SearchRequest, search_gpus, search_remedies, search_settings

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
