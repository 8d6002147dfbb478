"""Configurations of other frameworks as workloads: LLaMA-Factory, TRL's command line, axolotl, ms-swift, Automodel.

A dialect is a table (``NAME.yaml``: its keys, and what becomes of each) and, for keys that decide together, a function
of the table's name in ``NAME.py``.  What a framework does where its file says nothing is assumed, and printed.
"""
