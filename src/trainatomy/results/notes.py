"""Notes of a prediction that stand out from the others."""


class LeadingNote(str):
    """A note on something that was decided for the user and changes memory or time.

    Anything that adds to the notes of a prediction may add one of these; pages show them above the figures
    (``Prediction.leading_notes``), and other notes at their end.
    """

    __slots__ = ()
