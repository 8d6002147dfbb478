"""The loops of ``trainatomy.workload.loops``: the Hugging Face Trainer's, a plain one, and inference."""
