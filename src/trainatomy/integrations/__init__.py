"""Somebody's own training: what ``import trainatomy`` offers inside a script or a notebook that trains.

anatomy.py     ``watch`` around any loop
callback.py    ``AnatomyCallback`` for the Hugging Face Trainer (the only file here that imports transformers)
printing.py    ``print_gpu_utilization`` and ``print_summary``, as in the guides
missing.py     what is said once where there is no GPU
"""
