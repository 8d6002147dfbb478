"""Imported first in the process that workers are forked from, before all else that they need.

It and its workers end when the process that started it does, even if that is killed, and hear nothing of Ctrl-C: the
process that started them ends them (``runs/pools.py``).
"""

import os

from trainatomy.processes import SERVER_PARENT, end_with_parent, ignore_interrupts


def _prepare() -> None:
    ignore_interrupts()
    if parent := os.environ.pop(SERVER_PARENT, None):
        end_with_parent(int(parent))
    server = os.getpid()
    os.register_at_fork(after_in_child=lambda: end_with_parent(server))


_prepare()
