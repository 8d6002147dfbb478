"""Several training runs side by side: predictions in parallel processes, and runs on this machine's GPU.

options.py      how training runs are predicted and run
predicting.py   predictions of many training runs in parallel processes
plan.py         which runs a comparison needs, in which order, and the runs themselves, each recorded when it ends
comparison.py   a measured comparison as a whole: predict, run training runs without a record, compare
single.py       one training, predicted, measured and recorded
machine.py      the GPU, the driver and the versions of this machine
preload.py      what workers import first
published.py    figures that others published for a built-in comparison
"""
