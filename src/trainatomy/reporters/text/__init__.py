"""Result values as text pages: functions of a value that return what rich can draw.

rendering.py     consoles, tables, bars; ``render`` turns a page into a string of a fixed width
prediction.py    a prediction
memory.py        the memory breakdown: one peak, measured beside predicted, over time, by module
comparison.py    several training runs
fit.py           the outcome of a search for settings that fit; fit_tables.py: its tables
gpus.py          a training on several GPUs: with the best settings of each, or as it is
measurement.py   a measurement or a record
watched.py       a training that watched itself
history.py       the records of a folder
difference.py    two records compared
operations.py    the operations of a step
catalog.py       GPUs, architectures and calibrations

Titles and colours are in ``reporters.labels``, sentences in ``reporters.sentences``.
"""
