"""Imported first in the process that workers are forked from: hides modules that no worker needs.

``predicting.hidden_in_workers`` names them; see ``cli.workloads.skip_unused_imports`` for why.
"""

import os
import sys

for _name in os.environ.get("TRAINATOMY_HIDDEN_MODULES", "").split():
    sys.modules.setdefault(_name, None)  # type: ignore[arg-type]
