"""The reference page of all keys matches the schema."""

from __future__ import annotations

from pathlib import Path

import yaml

from trainatomy.workload import Workload
from trainatomy.workload.reference import reference
from trainatomy.workload.section import leaves

PAGE = Path(__file__).parents[2] / "docs" / "workload.md"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == reference(), (
        "run `python -m trainatomy.workload.reference > docs/workload.md`"
    )


def test_every_key_is_explained() -> None:
    for path, field in leaves(Workload):
        assert field.description, path
        assert f"| `{path[-1]}` |" in reference()


def test_the_example_of_the_page_is_a_workload() -> None:
    example = reference().split("```yaml\n")[1].split("```")[0]
    assert Workload.from_mapping(yaml.safe_load(example)).train.bf16
