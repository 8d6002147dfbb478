"""Reporters: result values as text, JSON and charts.  Functions of values; nothing is computed here.

labels.py       titles, colours and letters
sentences.py    sentences, as plain text; search_sentences.py: those on searches
settings.py     settings of a training in words
export.py       settings ready to paste: Python (export_python.py, export_spread.py), a workload file, options
document.py     documents: sections of tables, lists and sentences
text/           the documents of all results, and how a terminal shows them
html/           reports: charts, and the sections of documents
charts/         figures
json.py         what ``--json`` prints, as dataclasses (json_format.py); schema.py derives the JSON Schemas from them
"""
