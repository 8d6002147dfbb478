"""Numbers, tables and drawings of the concept pages, filled into the Markdown templates in this folder.

``docs/generate.py`` writes the pages. None of our own numbers is typed into a template.
"""
