"""Notes of a prediction that stand out from the others."""


class Assumption(str):
    """Note on what was assumed because nobody said it, and changes the answer: it belongs below the headline."""

    __slots__ = ()
