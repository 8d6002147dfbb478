"""The web page of ``trainatomy app``: a form for a training, its prediction, what fits, exports."""
