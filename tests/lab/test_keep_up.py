"""The tools that compare predictions and libraries with what was recorded (lab/)."""

from __future__ import annotations

import io
import json
import re
import subprocess
from fnmatch import fnmatch
from pathlib import Path
from unittest import mock

import keep_up
import named_sources
import pytest
import same
import sections
import surface
import upstream
from replaced import recorded_replacements

RECORDED = json.loads(keep_up.SURFACE.read_text(encoding="utf-8"))


# Names below the public interface


def test_each_private_name_in_the_source_has_a_reason() -> None:
    assert [name for name in named_sources.private_names() if keep_up.reason_of(name) is None] == []


def test_each_recorded_name_has_a_reason_and_each_reason_a_name() -> None:
    names = {*RECORDED["names"], *named_sources.private_names()}
    assert [name for name in names if keep_up.reason_of(name) is None] == []
    assert [pattern for pattern in keep_up.reasons() if not any(fnmatch(name, pattern) for name in names)] == []


def test_private_names_are_those_of_imports_and_of_attributes() -> None:
    names = named_sources.private_names()
    assert "simulator/recorder.py" in str(names["torch.utils._python_dispatch.TorchDispatchMode.__init__"])
    assert "torch.testing._internal.distributed.fake_pg.FakeStore" in names
    assert "torch.nn" not in names


def test_files_that_comments_and_data_name() -> None:
    files = named_sources.files_named()
    assert "trainatomy/catalog/versions.yaml" in files["c10/cuda/CUDAAllocatorConfig.cpp"]
    assert all(Path(name).suffix in {".py", ".cpp", ".cu", ".cuh", ".h", ".hpp"} for name in files)


def test_replaced_attributes_of_libraries_are_recorded() -> None:
    import torch

    with (
        recorded_replacements() as names,
        mock.patch.object(torch, "save", None),
        mock.patch.object(torch.Tensor, "numpy", None),
        mock.patch.object(json, "dumps", None),
    ):
        pass
    assert names == {"torch.save", "torch.Tensor.numpy"}


# What libraries are


def test_a_hash_of_code_sees_neither_comments_nor_docstrings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def hash_of(text: str, name: str) -> str:
        (tmp_path / f"{name}.py").write_text(text)
        return surface.source_hash(f"{name}.double")

    monkeypatch.syspath_prepend(str(tmp_path))
    plain = hash_of("def double(x):\n    return 2 * x\n", "plain_code")
    assert hash_of('def double(x):\n    """Double it."""\n    return 2 * x  # twice\n', "documented_code") == plain
    assert hash_of("def double(x):\n    return x + x\n", "other_code") != plain
    assert surface.source_hash("plain_code.treble") == surface.MISSING
    assert surface.source_hash("no_such_library.double") == surface.MISSING


def test_settings_have_their_defaults() -> None:
    fields = surface._fields("transformers", "TrainingArguments")
    assert fields["per_device_train_batch_size"] == "8"
    assert surface._fields("transformers", "NoSuchArguments") == {}


def test_what_came_went_and_changed_is_named() -> None:
    old = {
        **RECORDED,
        "settings": {"LoraConfig": {"r": "8", "old": "1"}, "SFTConfig": {"r": "8"}},
        "operators": {"aten::add": "1", "aten::qr": "2"},
    }
    new = {
        **old,
        "settings": {"LoraConfig": {"r": "16", "new": "None"}, "SFTConfig": {"r": "16"}},
        "operators": {"aten::add": "3"},
    }
    assert sections.settings(old, new).text.splitlines() == [
        "- `new` is new, by default None (LoraConfig)",
        "- `old` is gone (LoraConfig)",
        "- `r`: 8 -> 16 (LoraConfig, SFTConfig)",
    ]
    assert sections.operators(old, new).text.splitlines() == [
        "- operators that are gone: `aten::qr`",
        "- operators with another schema: `aten::add`",
    ]
    assert not sections.settings(old, old).needs_work
    assert not sections.names(old, old, keep_up.reason_of).needs_work


def test_changed_code_is_shown_with_the_reason_why_it_is_used() -> None:
    name = "torch.utils.checkpoint._CheckpointFrame"
    changed = {**RECORDED, "names": {**RECORDED["names"], name: "other"}}
    text = sections.names(RECORDED, changed, keep_up.reason_of).text
    assert text == f"- {keep_up.reason_of(name)}\n  - `{name}`\n"


# Source files


def commit(folder: Path, tag: str, **files: str) -> None:
    for name, text in files.items():
        (folder / f"{name}.cu").write_text(text)
    git = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b"]
    for arguments in (["add", "."], ["commit", "-qm", tag], ["tag", tag]):
        subprocess.run([*git, *arguments], check=True)


def test_files_that_changed_between_two_tags(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    (tmp_path / "aten").mkdir()
    commit(tmp_path, "v1", **{"aten/Loss": "1", "aten/Copy": "1", "aten/Sort": "1"})
    (tmp_path / "aten" / "Copy.cu").unlink()
    commit(tmp_path, "v2", **{"aten/Loss": "2", "aten/Sort": "2"})
    old, new = (upstream.read_tree(tag, tmp_path) for tag in ("v1", "v2"))
    changed = upstream.changed_files(old, new, ["Loss.cu", "aten/Copy.cu", "ort.cu"])
    assert changed == {"aten/Loss.cu": "changed", "aten/Copy.cu": "gone"}
    section = sections.upstream_files(changed, {"Loss.cu": ["rules.py"]}, ["v1", "v2"])
    assert "/v2/aten/Loss.cu) | changed | rules.py |" in section.text


@pytest.mark.parametrize("cut", [False, True])
def test_trees_of_github_are_read_by_folder_where_the_whole_is_truncated(
    cut: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    blob = {"path": "Loss.cu", "type": "blob", "sha": "1"}
    folders = [{"path": name, "type": "tree", "sha": f"of-{name}"} for name in ("aten", "docs")]
    answers = {
        "v1?recursive=1": {"truncated": cut, "tree": [*folders, {**blob, "path": "aten/Loss.cu"}]},
        "v1": {"truncated": False, "tree": folders},
        "of-aten?recursive=1": {"truncated": False, "tree": [blob]},
    }
    monkeypatch.setattr(
        upstream.urllib.request,
        "urlopen",
        lambda address, timeout: io.BytesIO(json.dumps(answers[address.rpartition("/trees/")[2]]).encode()),
    )
    assert upstream.read_tree("v1") == {"aten/Loss.cu": "1"}


def test_without_github_the_page_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream.urllib.request, "urlopen", mock.Mock(side_effect=OSError("no network")))
    section = keep_up._upstream_section(RECORDED, RECORDED, None)
    assert section.needs_work and section.text.startswith("Not compared: no network\n")
    assert "--pytorch pytorch.git" in section.text


# Tests and predictions


def test_failed_tests_are_grouped_by_their_cause(tmp_path: Path) -> None:
    report = tmp_path / "tests.xml"
    case = '<testcase classname="tests.a" name="{}">{}</testcase>'
    failed = '<failure message="ValueError: no&#10;more"/>'
    cases = [case.format("one", failed), case.format("two", failed), case.format("three", "")]
    report.write_text(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")
    section = sections.tests(report)
    assert section.title == "Tests: 2 of 3 fail"
    assert section.text == "- ValueError: no\n  - `tests.a::one`\n  - `tests.a::two`\n"
    assert sections.tests(report, ["tests/a"]).text == f"Only a part of the tests ran: `tests/a`.\n\n{section.text}"
    assert sections.tests(tmp_path / "none.xml").needs_work


def test_other_allocations_are_shown_by_place() -> None:
    old = [["forward", "layer", "aten::mm", 2, 100], ["backward", "", "aten::sum", 1, 8]]
    new = [
        ["forward", "layer", "aten::mm", 3, 90],
        ["backward", "", "aten::sum", 1, 8],
        ["forward", "", "aten::exp", 1, 4],
    ]
    assert sections.changes(old, new) == [
        sections.Change("forward", "layer", "aten::mm", 1, -10),
        sections.Change("forward", "", "aten::exp", 1, 4),
    ]


def test_predictions_that_differ_are_a_line_each_and_places_are_counted() -> None:
    different = {"a": ["time.step_seconds: 1.0 -> 2.0"], "b": ["memory.bytes: 8 -> 9", "not the same trace"]}
    place = sections.Change("forward", "layers.0.mlp", "aten::mm", 1, 8)
    moved = {"a": [place, place._replace(module="layers.1.mlp")], "b": [place._replace(bytes=-9)]}
    section = sections.predictions(different, moved, 3)
    assert section.title == "Predictions: 2 of 3 differ"
    lines = section.text.splitlines()
    assert lines[:2] == ["- **b**: memory.bytes: 8 -> 9; 1 more", "- **a**: time.step_seconds: 1.0 -> 2.0"]
    assert "- in 2: forward, `aten::mm` in `layers.*.mlp` (-9 bytes and +1 allocations in b)" in lines
    assert sections.predictions({}, {}, 3).text == "None.\n"


def test_differences_of_predictions_begin_with_the_largest() -> None:
    old = {"name": "a", "figures": {"bytes": 100, "seconds": 2.0, "fits": True}, "trace": "x", "details": "y"}
    new = {"name": "a", "figures": {"bytes": 101, "seconds": 3.0, "fits": True}, "trace": "z", "details": "y"}
    assert same.differences(old, new) == [
        "seconds: 2.0 -> 3.0 (+50.000%)",
        "bytes: 100 -> 101 (+1.000%)",
        "not the same trace",
    ]
    memory = [{"name": "a", "figures": {"memory.bytes": size, "seconds": size * size}} for size in (2, 3)]
    assert same.differences(*memory)[0] == "memory.bytes: 2 -> 3 (+50.000%)"
    assert same.differences(old, old) == []
    assert same.differences(old, {"name": "a", "error": "no"}) == ["error: none -> no"]
    assert same.differences({**old, "cudnn": "9.24.0"}, {**old, "cudnn": "9.19.0"}) == ["not the same cudnn"]


def test_predictions_by_cudnns_library_name_its_version() -> None:
    recorded = same.read(same.RECORD_WITH_LIBRARY)
    (version,) = {entry["cudnn"] for entry in recorded.values()}
    assert re.fullmatch(r"9\.\d+\.\d+", version)
    assert all(any(part in name for part in same.CONVOLVING) for name in recorded)
