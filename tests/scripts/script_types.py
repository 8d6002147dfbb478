"""Types of the fixtures."""

from __future__ import annotations

from collections.abc import Callable

from trainatomy.scripts.job import Outcome

RunScript = Callable[..., Outcome]
