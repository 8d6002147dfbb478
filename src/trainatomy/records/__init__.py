"""Records: one measured run, one file; a folder of them is the store, on any filesystem that fsspec knows.

create.py       create a record of a measurement: its id, its key, its row in a history
document.py     a record as JSON and back
folder.py       a folder, local or remote, in which files appear atomically
store.py        records in a folder: write, read, list, find
reference.py    resolve a reference to a record: an id, a prefix of one, ``last``, a path
query.py        conditions on records, on settings of their workloads among them
difference.py   compare two records
reading.py      ``trainatomy.history``, ``read_record`` and ``diff``
"""
