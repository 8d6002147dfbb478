"""What each verb is asked: one frozen dataclass, of which its options on the command line and its help are made.

A field that has an option carries it in its annotation; the others are for callers in Python. The functions of
``trainatomy.api`` take the fields as keywords, and everything below them takes the request whole.
"""
