"""Result values as charts, drawn by matplotlib (the extra ``plot``).

style.py         the look of all charts, and the conversion to a file
comparison.py    several training runs: memory by component and throughput
fit.py           a search: memory against throughput of every executed candidate
lengths.py       samples of different lengths: reserved memory over the steps of some orders
gpus.py          one training on several GPUs: with the best settings of each, or as it is
scaling.py       one training on different numbers of GPUs
"""
