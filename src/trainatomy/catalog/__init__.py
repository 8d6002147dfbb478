"""Facts about GPUs, architectures, software releases and published runs: data files with the source of each number.

Nothing here imports torch or transformers, and each loader reads only the file that it needs.
"""
