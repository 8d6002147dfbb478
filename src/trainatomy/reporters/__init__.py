"""Faces: the same values as text, as JSON and on the command line.  Functions of values; nothing is computed here."""
