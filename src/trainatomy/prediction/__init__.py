"""Assemble predictions from simulations: memory, time, lengths, pipelines, and their detail."""
