"""Result values as text pages: functions of a value that return what rich can draw.

rendering.py     consoles, tables, bars; ``render`` turns a page into a string of a fixed width
prediction.py    a prediction
memory.py        the memory breakdown: one peak, measured beside predicted, over time, by module
comparison.py    several trainings
measurement.py   a measurement or a record
watched.py       a training that watched itself
history.py       the records of a folder
difference.py    two records compared
operations.py    the operations of a step
catalog.py       GPUs, architectures and calibrations

Titles and colours are in ``reporters.labels``, sentences in ``reporters.sentences``.
"""

from trainatomy.reporters.text.catalog import architectures_table, calibration_page, gpu_page, gpus_table
from trainatomy.reporters.text.comparison import comparison_page
from trainatomy.reporters.text.difference import difference_page
from trainatomy.reporters.text.history import history_page
from trainatomy.reporters.text.measurement import measurement_page, record_page
from trainatomy.reporters.text.operations import operations_page
from trainatomy.reporters.text.prediction import prediction_page, verdict_line
from trainatomy.reporters.text.rendering import console, render

__all__ = [
    "architectures_table",
    "calibration_page",
    "comparison_page",
    "console",
    "difference_page",
    "gpu_page",
    "gpus_table",
    "history_page",
    "measurement_page",
    "operations_page",
    "prediction_page",
    "record_page",
    "render",
    "verdict_line",
]
