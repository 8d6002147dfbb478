"""Values as charts, drawn by matplotlib (the extra ``plot``).

style.py         colours, fonts, and how a figure becomes the bytes of a file
comparison.py    several trainings: memory by component beside throughput
"""
