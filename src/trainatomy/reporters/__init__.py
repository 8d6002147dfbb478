"""Reporters: result values as text, JSON and charts.  Functions of values; nothing is computed here.

labels.py       titles, colours and letters
sentences.py    sentences, as plain text
text/           pages for the terminal
charts/         figures
json.py         what ``--json`` prints; schema.py derives its JSON Schema
"""
