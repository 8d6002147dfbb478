"""The cases of lab/host: drawn the same each time, and predicted as what they are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import host_compare
import host_limits
import pytest
from host_cases import draw

MIB = 1 << 20


def test_a_draw_depends_on_its_seed_alone() -> None:
    assert draw(5, 7) == draw(5, 7) != draw(5, 8)


@pytest.mark.parametrize("place", ["cpu", "away"])
def test_what_would_be_on_the_gpu_is_counted_on_the_cpu_only(place: str, tmp_path: Path) -> None:
    from transformers import BertConfig

    case = next(case for case in draw(40, 7) if case.model.startswith("Bert") and case.saves)
    config = {**case.config, "num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 1, "vocab_size": 4000}
    BertConfig(**config, dtype="float32").save_pretrained(tmp_path)
    case = replace(case, place=place, config=config, objects=0)
    bill = host_compare.predicted(case, tmp_path)
    parts = {part.component for phase in bill.phases for process in phase.processes for part in process.parts}
    assert ("tensors" in parts) == (place == "cpu")
    assert ("checkpoint" in parts) == (place == "away")
    assert "cuda" not in parts or all(
        part.bytes == 0
        for phase in bill.phases
        for process in phase.processes
        for part in process.parts
        if part.component == "cuda"
    )


def test_a_training_on_gpus_is_predicted_with_cuda_and_with_what_it_keeps_on_the_host(tmp_path: Path) -> None:
    from transformers import GPT2Config

    case = next(case for case in draw(40, 7, 2) if case.offload == "shards" and case.model.startswith("GPT2"))
    config = {"n_layer": 1, "n_embd": 64, "n_head": 1, "vocab_size": 1000}
    GPT2Config(**config, dtype="float32", bos_token_id=None, eos_token_id=None).save_pretrained(tmp_path)
    bill = host_compare.predicted(replace(case, config=config, length=64), tmp_path)
    parts = {part.component: part for process in bill.fullest.processes for part in process.parts}
    assert parts["cuda"].bytes and parts["offloaded"].bytes
    assert sum(process.count for process in bill.fullest.processes if process.role == "training") == 2


def test_the_bills_of_ranks_are_those_of_one_host() -> None:
    part = {"component": "", "kind": "anonymous", "bytes": 5 * MIB}
    phase = {"name": "training", "processes": [{"role": "training", "parts": [part]}], "shm_bytes": 3}
    ranks = [{"phases": [phase], "launcher": launcher} for launcher in ((2 * MIB, MIB, 0, 3 * MIB), None)]
    (together,) = host_compare._together(ranks).phases
    assert together.needed_bytes == 12 * MIB + 3
    assert together.held_bytes == 13 * MIB + 3


@pytest.mark.parametrize(
    ("verdict", "killed", "is_right"),
    [("does not fit", 1, True), ("fits", 0, True), ("tight", 0, True), ("does not fit", 0, False), ("tight", 2, False)],
)
def test_a_verdict_is_right_if_the_kernel_does_what_it_says(verdict: str, killed: int, is_right: bool) -> None:
    assert host_limits.is_right({"verdict": verdict, "killed": killed}) == is_right


@pytest.mark.parametrize(
    ("folder", "events"), [("memory", "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n"), ("", "oom 4\noom_kill 3\n")]
)
def test_a_group_of_either_version_has_its_limit_and_counts_kills(folder: str, events: str, tmp_path: Path) -> None:
    (tmp_path / folder).mkdir(exist_ok=True)
    with pytest.raises(OSError, match="not empty"), host_limits.group(4096, tmp_path) as made:
        (made.folder / made.events).write_text(events)
        assert (made.folder / made.limit).read_text() == "4096"
        assert made.killed == 3
