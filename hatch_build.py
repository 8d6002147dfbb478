"""Price the points of the shipped calibrations when the package is built, so that no prediction has to."""

import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CompileCalibrations(BuildHookInterface):
    """Write ``catalog/compiled`` before a wheel is made, or an editable installation."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Write it with the code that is built."""
        sys.path.insert(0, str(Path(self.root, "src")))
        from trainatomy.timing.compiled import write

        write()
