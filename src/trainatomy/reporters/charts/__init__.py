"""Result values as charts, drawn by matplotlib (the extra ``plot``).

style.py         the look of all charts, and the conversion to a file
comparison.py    several training runs: memory by component and throughput
fit.py           a search: memory against throughput of every executed candidate
lengths.py       samples of different lengths: reserved memory over the steps of some orders
gpus.py          one training on several GPUs: with the best settings of each, or as it is
scaling.py       one training on different numbers of GPUs
"""

from trainatomy.lazy import lazy

NAMES = {
    "reporters.charts.comparison": "draw as draw_comparison",
    "reporters.charts.fit": "draw as draw_fit",
    "reporters.charts.gpus": "draw_gpus",
    "reporters.charts.lengths": "draw as draw_lengths",
}
__getattr__, __dir__, __all__ = lazy(__name__, NAMES)
