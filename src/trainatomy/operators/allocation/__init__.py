"""What CUDA's kernels allocate besides the tensors that they return: rules by operator, and workspaces."""

from __future__ import annotations

from trainatomy.operators.allocation.plan import Rule
from trainatomy.operators.allocation.table_a import RULES_A
from trainatomy.operators.allocation.table_b import RULES_B

RULES: dict[str, Rule] = {**RULES_A, **RULES_B}
