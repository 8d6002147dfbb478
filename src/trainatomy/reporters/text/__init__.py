"""The documents of results, and how a terminal shows them.

rendering.py     consoles, tables, bars; ``render`` turns a document into a string of a fixed width
prediction.py    a prediction
memory.py        the memory breakdown: one peak, measured beside predicted, over time, by module
comparison.py    several training runs
fit.py           the outcome of a search for settings that fit
gpus.py          a training on several GPUs, the GPUs that are known, architectures and calibrations
measurement.py   a measurement or a record
script.py        a script that trains, a training that watched itself, a DataLoader
history.py       the records of a folder, and two of them compared
operations.py    the operations of a step
doctor.py        a machine and what is wrong with it

Titles and colours are in ``reporters.labels``, sentences in ``reporters.sentences``.
"""

from trainatomy.lazy import lazy

NAMES = {"reporters.text.prediction": "verdict_line", "reporters.text.rendering": "render"}
__getattr__, __dir__, __all__ = lazy(__name__, NAMES)
