"""Values as text: a function of a value gives what rich can draw, and ``render`` makes a string of fixed width of it.

page.py          a prediction, whole
verdict.py       its answer in one line
bill.py          what device memory holds, component by component
evidence.py      where the peak is, which modules hold it, bytes per parameter, what it rests on
timeline.py      memory by component over the steps
comparison.py    several predictions
measurement.py   a measurement beside its prediction
history.py       records
difference.py    two records; answer.py says it in one sentence
catalogue.py     cards and architectures
"""

from trainatomy.reporters.text.catalogue import architectures_table, card_page, cards_table
from trainatomy.reporters.text.comparison import comparison_page
from trainatomy.reporters.text.difference import difference_page
from trainatomy.reporters.text.history import history_page
from trainatomy.reporters.text.measurement import measurement_page
from trainatomy.reporters.text.page import prediction_page
from trainatomy.reporters.text.rendering import console, render

__all__ = [
    "architectures_table",
    "card_page",
    "cards_table",
    "comparison_page",
    "console",
    "difference_page",
    "history_page",
    "measurement_page",
    "prediction_page",
    "render",
]
