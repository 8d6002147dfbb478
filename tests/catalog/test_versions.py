"""Facts by version of torch and transformers."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest

from trainatomy.catalog.files import read_yaml
from trainatomy.catalog.versions import (
    behaviour,
    checked,
    first_release_with,
    oldest_release,
    parse_version,
    version_note,
)
from trainatomy.errors import WorkloadError

SOURCES = Path(__file__).parents[2] / "src" / "trainatomy"


@pytest.mark.parametrize(
    ("text", "version"), [("2.11.0+cu130", (2, 11)), ("2.9", (2, 9)), ("2.14.0a0+git1", (2, 14)), ("1.10", (1, 10))]
)
def test_versions_are_read(text: str, version: tuple[int, int]) -> None:
    assert parse_version(text) == version


def test_invalid_versions_are_refused() -> None:
    with pytest.raises(WorkloadError, match="'latest' is not a version"):
        parse_version("latest")


@pytest.mark.parametrize(
    ("name", "version", "value"),
    [
        ("softmax_saves_its_input", (1, 10), True),
        ("softmax_saves_its_input", (1, 11), False),
        ("autocast_runs_rms_norm_in_fp32", (2, 11), False),
        ("autocast_runs_rms_norm_in_fp32", (2, 13), True),
        ("cudnn_of_the_wheel", (2, 10), 91002),
        ("cudnn_of_the_wheel", (2, 11), 91900),
        ("cudnn_of_the_wheel", (2, 13), 92000),
        ("embedding_backward_adds_atomically", (2, 10), False),
    ],
)
def test_the_last_entry_that_applies_wins(name: str, version: tuple[int, int], value: object) -> None:
    assert behaviour(name, version) == value


def test_the_release_that_added_an_allocator_option() -> None:
    assert first_release_with("allocator_options", "large_segment_size_mb") == (2, 13)
    assert first_release_with("allocator_options", "expandable_segments") is None


def test_releases_that_were_checked_need_no_note() -> None:
    assert checked("torch", (2, 11)) == "measured"
    assert version_note("torch", (2, 11)) is None and version_note("torch", (1, 10)) is None


@pytest.mark.parametrize("version", [(2, 16), (3, 0), (2, 5)])
def test_a_release_that_was_never_checked_is_simulated_with_a_note(version: tuple[int, int]) -> None:
    note = version_note("torch", version)
    assert note is not None and note.startswith(f"torch {version[0]}.{version[1]} is simulated") and "2.11" in note


def test_a_release_older_than_all_known_rules_is_refused() -> None:
    assert oldest_release("torch") == (1, 10)
    with pytest.raises(
        WorkloadError, match=r"torch 1\.0 cannot be simulated: rules are known from torch 1\.10 on"
    ) as found:
        version_note("torch", (1, 0))
    assert found.value.key == "software.torch"


def test_every_entry_has_a_source_and_is_in_order() -> None:
    for name, content in read_yaml("versions.yaml")["behaviours"].items():
        entries = content["releases"]
        assert content["about"].endswith("."), name
        assert all(entry["source"] for entry in entries), name
        since = [parse_version(entry["since"]) for entry in entries]
        assert since[0] == (1, 0) and all(first < second for first, second in pairwise(since)), name


def test_every_entry_is_read() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in SOURCES.rglob("*.py"))
    for section, readers in (
        ("behaviours", "behaviour|first_release_with"),
        ("transformers", "transformers_has|transformers_since"),
    ):
        read = re.findall(rf'\b(?:{readers})\(\s*"(\w+)"', text)
        assert set(read) == set(read_yaml("versions.yaml")[section])


def test_no_other_file_compares_versions() -> None:
    """Check that rules that depend on a release are in the data file, so that all are in one place."""
    pattern = re.compile(r"version\b[^\n]*[<>]=? *\(\d+, *\d+\)")
    found = [str(path) for path in SOURCES.rglob("*.py") if pattern.search(path.read_text(encoding="utf-8"))]
    assert found == []
