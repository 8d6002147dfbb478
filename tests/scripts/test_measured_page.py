"""The measured scripts in lab/pages/scripts.md are those of the shipped lines."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

FILE = Path(__file__).parents[2] / "lab" / "scripts" / "compare.py"


def compare() -> Any:
    spec: Any = importlib.util.spec_from_file_location("compare_scripts", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_shows_the_shipped_lines() -> None:
    module = compare()
    text = module.PAGE.read_text()
    assert module.write_page(text) == text


def test_held_out_scripts_that_no_benchmark_mode_decides_are_within_three_percent() -> None:
    module = compare()
    found = [
        line for line in module.rows(module.MEASURED) if line["set"] == "held out" and line["name"] != "dcgan-wide"
    ]
    assert len(found) == 13
    for line in found:
        for key, limit in (("peak_allocated_bytes", 0.03), ("peak_reserved_bytes", 0.1)):
            assert abs(line["predicted"][key] / line["measured"][key] - 1) < limit, line["name"]
