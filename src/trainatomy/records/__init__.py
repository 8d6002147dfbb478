"""Records: one measured run, one file; a folder of them is the store, on any filesystem that fsspec knows.

key.py          a hash of what was asked for
make.py         a record of a measurement
document.py     a record as JSON and back, with the version of its form
place.py        a folder, here or elsewhere: files that are there whole or not at all
store.py        records in a place: write, read, list, find
reference.py    which record is meant: an id, the beginning of one, ``last``, a path
query.py        which records are wanted
summary.py      a record as a row of a history
settings.py     a workload's settings by dotted key, defaults included
difference.py   what changed between two records, and which component it went to
reading.py      ``trainatomy.history``, ``read_record`` and ``diff``
"""
