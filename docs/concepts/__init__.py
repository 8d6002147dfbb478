"""What the concept pages show: numbers and drawings from the data files, put into the text of ``*.md`` beside this.

``docs/generate.py`` writes the pages; nothing in them that is a number of ours is typed by hand.
"""
