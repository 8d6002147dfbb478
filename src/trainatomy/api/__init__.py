"""The library's functions: predict, fit, compare, measure, ops, calibrate, diagnose. They return values.

The functions with keywords are for users.  Those that take a request (``predict_training``, ``search_settings`` and
others) are for the command line, whose options are the fields of requests.

Names are imported when they are first used, so that a prediction loads no search.
"""

from __future__ import annotations

from trainatomy.lazy import lazy

NAMES = {
    "api.calibrating": "calibrate",
    "api.comparing": "compare, compare_gpus, measure_comparison, predict_comparison",
    "api.detailing": "ops, predict_in_detail",
    "api.diagnosing": "diagnose",
    "api.fitting": "fit, fit_gpus, measure_fit, search_settings, why_out_of_memory",
    "api.fitting_modules": "module_candidates",
    "api.loading": "load_dataset, time_loader",
    "api.measuring": "measure, measure_and_record, this_gpu",
    "api.predicting": "predict, predict_training",
    "api.scripts": "dry_run, run_script, DryRun",
    "prediction.assemble": "keep_executed",
    "prediction.detail": "detail_of_executed",
    "runs.comparison": "ComparisonInterrupted",
    "runs.predicting": "jobs_for",
}
__getattr__, __dir__, __all__ = lazy(__name__, NAMES)
