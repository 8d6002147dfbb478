"""Short answers for coding agents: whether a training fits, how long it takes, and the change that helps.

``answers.py`` computes them in a process with limits; ``server.py`` serves them by the Model Context Protocol.
"""
