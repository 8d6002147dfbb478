"""Campaigns: many measurements one after the other, each in a fresh process, each recorded when it ends.

plan.py      what is to be run, in which order, and the name under which its records are kept
machine.py   which GPU and which versions a record must be of to stand for a run
run.py       the runs themselves: what is in the store is not run again, what fails does not stop the rest
gather.py    what was predicted, measured and published, as one comparison
"""
