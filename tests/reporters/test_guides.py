"""The guides show output of every command that predicts, and name no number of ours in their own words."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

GUIDES = Path(__file__).parents[2] / "docs" / "guides"
ENGLISH = sorted(GUIDES.glob("*.md"))
TUTORIALS = sorted((GUIDES.parent / "tutorials").glob("*.md"))
PUBLISHED = {"14,949 MB", "24 GB"}
"""Numbers of the original guides, and of data sheets."""


def test_both_guides_are_there() -> None:
    assert [page.stem for page in ENGLISH] == ["fit-bigger-train-faster", "training-anatomy"]


@pytest.mark.parametrize("page", [*ENGLISH, *TUTORIALS], ids=lambda page: page.stem)
def test_numbers_are_in_generated_output_only(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.DOTALL)
    typed = re.findall(r"\d{1,3}(?:,\d{3})+(?: [KMG]B)?|\d[\d.]* (?:[KMG]i?B|[mµ]?s|%|TFLOP|TB)\b", text)
    assert set(typed) <= PUBLISHED


@pytest.mark.parametrize("page", ENGLISH, ids=lambda page: page.stem)
def test_every_prediction_shows_its_output(page: Path) -> None:
    text = page.read_text("utf-8")
    commands = re.findall(r"```console\n\$ trainatomy (?:predict|compare|ops) ", text)
    assert len(commands) == len(re.findall(r"written by `make docs` -->\n\n```text\n[^`]+\n```", text)) > 1


@pytest.mark.parametrize(
    ("page", "workload"),
    [("guides/training-anatomy.md", "guides/bert-large.yaml"), ("tutorials/rent-a-card.md", "tutorials/train.yaml")],
)
def test_the_workload_is_the_one_on_the_page(page: str, workload: str) -> None:
    block = re.search(r"```yaml\n(.*?)```", (GUIDES.parent / page).read_text("utf-8"), re.DOTALL)
    assert block is not None
    assert yaml.safe_load(block[1]) == yaml.safe_load((GUIDES.parent / workload).read_text("utf-8"))


@pytest.mark.parametrize("language", ["es", "ja"])
@pytest.mark.parametrize("page", ENGLISH, ids=lambda page: page.stem)
def test_translations_are_in_step(page: Path, language: str) -> None:
    english, translated = page.read_text("utf-8"), (GUIDES / language / page.name).read_text("utf-8")
    assert blocks(translated) == blocks(english)
    assert inline_code(translated) == inline_code(english)
    assert numbers(translated) == numbers(english)
    assert translated.count("\n## ") == english.count("\n## ")


def test_the_site_keeps_links_within_docs_and_points_others_at_the_repository() -> None:
    from types import SimpleNamespace

    from site_links import on_page_markdown

    page = SimpleNamespace(file=SimpleNamespace(src_uri="guides/es/training-anatomy.md"))
    config = SimpleNamespace(extra={"repository": "https://host/project"})
    linked = on_page_markdown("[a](../../fit.md#on-a-cluster) [b](../../../examples/x.py)", page=page, config=config)
    assert linked == "[a](../../fit.md#on-a-cluster) [b](https://host/project/blob/main/examples/x.py)"


def blocks(text: str) -> list[str]:
    return re.findall(r"```.*?```|<!--.*?-->", text, re.DOTALL)


def prose(text: str) -> str:
    return re.sub(r"```.*?```|<!--.*?-->|\]\([^)]*\)", "", text, flags=re.DOTALL)


def inline_code(text: str) -> list[str]:
    return sorted(re.findall(r"`[^`]+`", prose(text)))


def numbers(text: str) -> list[str]:
    return re.findall(r"\d+(?:[.,]\d+)*", re.sub(r"`[^`]+`", "", prose(text)))
