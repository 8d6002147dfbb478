"""Flags of mappings and of FSDP, as they are pasted from commands of example scripts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trainatomy.errors import WorkloadError
from trainatomy.workload import Workload
from trainatomy.workload.overrides import merge

GPT2 = Workload.from_mapping({"model": {"id": "gpt2"}, "parallel": {"gpus": 2}})


def changed(**flags: object) -> Workload:
    return merge(GPT2, flags)


def test_a_mapping_in_braces_or_in_a_file(tmp_path: Path) -> None:
    expected = {"use_reentrant": False}
    (tmp_path / "settings.json").write_text(json.dumps(expected))
    for text in ('{"use_reentrant": false}', "use_reentrant=false", f"{tmp_path}/settings.json"):
        found = changed(gradient_checkpointing_kwargs=[text])
        assert found.train.gradient_checkpointing_kwargs == expected
    with pytest.raises(WorkloadError, match="cannot read"):
        changed(gradient_checkpointing_kwargs=[f"{tmp_path}/nothing.json"])


def test_several_options_of_fsdp_in_one_text() -> None:
    assert changed(fsdp=["full_shard auto_wrap"]).train.fsdp == ("full_shard", "auto_wrap")
    assert changed(fsdp=["true"]).train.fsdp is True
