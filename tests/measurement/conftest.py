"""Lets the tests of this folder import ``fake_gpu`` and the accuracy benchmark's files."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "benchmarks" / "accuracy")]
