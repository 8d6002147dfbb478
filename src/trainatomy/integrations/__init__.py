"""Integrations with a user's own training, in a script or a notebook.

watch.py              ``trainatomy.watch`` around any loop
callback.py           ``AnatomyCallback`` for the Hugging Face Trainer (the only file here that imports transformers)
printing.py           ``print_gpu_utilization`` and ``print_summary``, as in the guides
live_measurement.py   one watched training: hooks, recorder, PyTorch's memory history and the result
live_prediction.py    the prediction of a watched training
"""
