"""Facts about cards, architectures, libraries and published runs, as data files that say where each number comes from.

Nothing here imports torch or transformers, and each loader reads only the file that it was asked for.
"""
