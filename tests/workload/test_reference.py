"""The reference page of all keys matches the schema."""

from __future__ import annotations

import re
from pathlib import Path

import yaml
from concepts.workload import reference

from trainatomy.workload import Workload
from trainatomy.workload.section import leaves

DOCS = Path(__file__).parents[2] / "docs"


def test_the_pages_are_up_to_date() -> None:
    for name, page in reference().items():
        assert (DOCS / name).read_text(encoding="utf-8") == page, f"{name}: run `make docs`"


def test_every_key_is_explained() -> None:
    for path, field in leaves(Workload):
        assert field.description, path
        page = f"workload/{path[0]}.md" if len(path) > 1 else "workload.md"
        assert re.search(rf"^- \[?`{path[-1]}`", reference()[page], re.MULTILINE), path


def test_the_example_of_the_page_is_a_workload() -> None:
    example = reference()["workload.md"].split("```yaml\n")[1].split("```")[0]
    assert Workload.from_mapping(yaml.safe_load(example)).train.bf16
