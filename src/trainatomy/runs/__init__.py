"""Campaigns: many measurements one after the other, each in a fresh process, each recorded when it ends.

plan.py      what is to be run, in which order, and the name under which its records are kept
machine.py   which GPU and which versions a record must be of to stand for a run
run.py       the runs themselves: what is in the store is not run again, what fails does not stop the rest
campaign.py  all of it together: predict, run what is not on record, compare
published.py what others published of a ready comparison
gather.py    what was predicted, measured and published, as one comparison
"""
