"""``era: "2022"`` sets all that the software of that year did otherwise, and nothing that is set already."""

from __future__ import annotations

from typing import Any

import pytest

from trainatomy.errors import WorkloadError
from trainatomy.workload.builtin import notebook
from trainatomy.workload.overlay import get_key
from trainatomy.workload.schema import Workload

BUNDLE = {
    ("software", "torch"): "1.10",
    ("model", "attn_implementation"): "eager",
    ("zero_grad_set_to_none",): False,
    ("train", "optim"): "trainatomy.training.adamw_hf.AdamW",
    ("train", "gradient_checkpointing_kwargs"): {"use_reentrant": True},
}
OTHERS: dict[tuple[str, ...], Any] = {
    ("software", "torch"): "2.11",
    ("model", "attn_implementation"): "sdpa",
    ("zero_grad_set_to_none",): True,
    ("train", "optim"): "adamw_torch_fused",
    ("train", "gradient_checkpointing_kwargs"): {"use_reentrant": False},
}


def of_2022(**sections: Any) -> Workload:
    return Workload.from_mapping({"model": {"id": "gpt2"}, "era": "2022", "gpu": "v100-16gb", **sections})


def test_the_era_is_the_whole_bundle() -> None:
    mapping = of_2022().to_mapping()
    assert {path: get_key(mapping, path) for path in BUNDLE} == BUNDLE


def test_a_training_of_the_guide_needs_the_era_alone() -> None:
    vanilla = {**notebook()[0].to_mapping(), "era": "2022", "gpu": "v100-16gb"}
    assert Workload.from_mapping(vanilla) == notebook("2022")[0]


@pytest.mark.parametrize("path", BUNDLE)
def test_what_is_set_stays_also_where_it_is_todays_default(path: tuple[str, ...]) -> None:
    section: Any = OTHERS[path]
    for name in reversed(path[1:]):
        section = {name: section}
    given = {"id": "gpt2", **section} if path[0] == "model" else section
    workload = of_2022(**{path[0]: given})
    expected = {**BUNDLE, path: OTHERS[path]}
    for each in (workload, Workload.from_mapping(workload.to_mapping()), workload.replace("gpu", "t4")):
        mapping = each.to_mapping()
        assert {name: get_key(mapping, name) for name in BUNDLE} == expected


@pytest.mark.parametrize("mode", ["inference", "generation"])
def test_nothing_is_set_that_does_not_apply(mode: str) -> None:
    generation = {"generation": {"max_new_tokens": 2}} if mode == "generation" else {}
    mapping = of_2022(mode=mode, **generation).to_mapping()
    assert mapping["model"]["attn_implementation"] == "eager" and mapping["software"] == {"torch": "1.10"}
    assert "train" not in mapping and "zero_grad_set_to_none" not in mapping


def test_a_factory_decides_on_attention() -> None:
    workload = of_2022(model={"factory": "mine:build"}, data={"factory": "mine:batch"})
    assert "attn_implementation" not in workload.to_mapping()["model"]
    assert workload.to_mapping()["train"]["optim"] == BUNDLE["train", "optim"]


@pytest.mark.parametrize(
    ("sections", "name"),
    [
        ({"loop": "sft"}, "TRL's trainers"),
        ({"train": {"torch_compile": True}}, "torch.compile"),
        ({"train": {"use_liger_kernel": True}}, "Liger's kernels"),
        ({"model": {"id": "gpt2", "attn_implementation": "flex_attention"}}, "FlexAttention"),
        ({"loop": "pytorch", "parallel": {"gpus": 2, "strategy": "fsdp2"}}, "FSDP2"),
    ],
)
def test_what_came_later_is_refused_by_name(sections: dict[str, Any], name: str) -> None:
    with pytest.raises(WorkloadError, match=rf"era: emulates libraries without {name}: leave it out"):
        of_2022(**sections)
