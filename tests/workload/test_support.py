"""The table of settings that do not go together: every rule can fire, and none refuses what is known to work."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

import pytest
from predicted import training_cases
from pydantic import ValidationError

from trainatomy.errors import WorkloadError
from trainatomy.workload.features import FACTS, FEATURES
from trainatomy.workload.overlay import set_key
from trainatomy.workload.schema import Workload
from trainatomy.workload.section import key_of, keys, section_at
from trainatomy.workload.support import Rule, Subject, belongs_to, table

Settings = dict[str, Any]
TWO, EIGHT = {"parallel.gpus": 2}, {"parallel.gpus": 8}
LENGTHS = {"data.lengths": {"distribution": "uniform", "minimum": 16, "maximum": 128, "samples": 64}}
FOUR_BITS = {"model.quantization": {"load_in_4bit": True}}
CUTS = {"model.kernels": ["cut_cross_entropy"]}
EXAMPLES: Mapping[str, Settings] = {
    "data.lengths": LENGTHS,
    "model.quantization": FOUR_BITS,
    "train.deepspeed": {"train.deepspeed": {"zero_optimization": {"stage": 2}, "train_batch_size": "auto"}},
    "train.fsdp": {"train.fsdp": True},
    "ema_decay": {"ema_decay": 0.9},
    "keep_outputs": {"keep_outputs": True},
    "skipped_steps": {"skipped_steps": 1, "train.fp16": True},
    "activation_offloading": {"activation_offloading": "pinned"},
    "trl": {"trl.packing": True},
    "generation": {"generation.num_beams": 2},
    "parallel.tp_size": {**TWO, "parallel.tp_size": 2},
    "parallel.cp_size": {**TWO, "parallel.cp_size": 2},
    "parallel.pp_size": {**TWO, "parallel.pp_size": 2},
    "parallel.dp_shard_size": {**TWO, "parallel.dp_shard_size": 2},
    "generation.num_return_sequences": {"generation.num_return_sequences": 4},
    "the Trainer": {"loop": "trainer"},
    "TRL's trainers": {"loop": "sft"},
    "trainers on preferences": {"loop": "preference"},
    "a reference model": {"loop": "preference"},
    "preference": {"preference.rpo_alpha": 0.5},
    "sentence-transformers' trainer": {"loop": "sentence_transformers"},
    "sentence_transformers": {"sentence_transformers.negatives": 1},
    "model.config.dtype": {"model.config": {"dtype": "bfloat16"}},
    "model.config.torch_dtype": {"model.config": {"torch_dtype": "bfloat16"}},
    "quantised weights": FOUR_BITS,
    "model.kernels": CUTS,
    "cut cross-entropy": CUTS,
    "kernels for adapters": {"model.kernels": ["lora_o_kernel"]},
    "adapters with magnitudes or a bias": {"model.lora": {"use_dora": True}},
    "weights quantised otherwise than in 4 bits": {"model.quantization": {"load_in_8bit": True}},
    "Liger's losses": {"train.use_liger_kernel": True},
    "ZeRO-3": {"train.deepspeed": {"zero_optimization": {"stage": 3}, "train_batch_size": "auto"}},
    "another library than bitsandbytes": {
        "model.quantization": {"quant_method": "torchao", "quant_type": "Int8WeightOnlyConfig"}
    },
    "an optimizer's function": {"train.optim": "a:make"},
    "tuples in train.optim_args": {"train.optim_args": "eps=(1e-30,0.001)"},
    "float16 gradients": {"model.dtype": "float16", "train.fp16": True},
    "train.torch_compile": {"train.torch_compile": True},
    "train.gradient_checkpointing_kwargs.offload": {
        "train.gradient_checkpointing": True,
        "train.gradient_checkpointing_kwargs": {"offload": True},
    },
    "batches that vary": LENGTHS,
    "experts in 4 bits": {
        "model.quantization": {"load_in_4bit": True, "bnb_4bit_experts": True},
        "model.lora": {"r": 4},
    },
    "adapters on parameters": {"model.lora": {"r": 4, "target_parameters": ["experts.down_proj"]}},
    "media that differ": {"data.lengths": {"5s": 4}},
    "images that differ": {"data.lengths": {"480x640": 4}},
    "evaluation": {"train.eval_strategy": "steps"},
    "saving": {"train.save_strategy": "steps"},
    "resuming": {"train.resume_from_checkpoint": True},
    "an evaluation or a checkpoint between the steps": {"train.eval_strategy": "steps"},
    "gathered outputs": {"data.compute_metrics": True},
    "a checkpoint of whole files": {"train.resume_from_checkpoint": True, **FOUR_BITS},
    "several GPUs": TWO,
    "an AMD GPU": {"gpu": "mi300x"},
    "an optimizer of torchao": {"train.optim": "adamw_torch_4bit"},
    "a MIG instance": {"gpu": "h200:3g.71gb"},
    "several data-parallel ranks": EIGHT,
    "replicas": {**EIGHT, "parallel.dp_replicate_size": 2},
    "fewer replicas than ranks": {**EIGHT, "parallel.dp_replicate_size": 2},
    "whole weights on each rank": {},
    "DDP": {},
    "DataParallel": {**TWO, "parallel.strategy": "dp"},
    "4 bits by the Trainer's FSDP": {**FOUR_BITS, **TWO, "train.fsdp": True},
    "a number of ranks in parallel.reshard_after_forward": {"parallel.reshard_after_forward": 2},
    "all_but_last in parallel.reshard_after_forward": {"parallel.reshard_after_forward": "all_but_last"},
    "micro-batches without a reduction": {**TWO, "train.gradient_accumulation_steps": 2},
    "gpu.power_limit_watts": {"gpu": {"base": "h200", "power_limit_watts": 400}},
    "a pipeline": {**TWO, "parallel.pp_size": 2},
    "a looped schedule": {"parallel.pp_schedule": "LoopedBFS"},
    "several stages on each rank": {"parallel.pp_stages_per_rank": 2},
    "1F1B with fewer micro-batches than stages": {"parallel.pp_microbatches": 1},
    "rounds that are not whole": {"parallel.pp_schedule": "Interleaved1F1B", "parallel.pp_microbatches": 5},
    "trl.packing": {"loop": "sft", "trl.packing": True},
    "packs cut anywhere": {"loop": "sft", "trl.packing": True, "trl.packing_strategy": "wrapped"},
    "samples of any length": {"trl.max_length": None},
    "samples longer than trl.max_length": {"data.sequence_length": 2048},
    "samples cut to their prompt": {"data.prompt_length": 2048},
    "no room for an answer": {"data.prompt_length": 64, "data.sequence_length": 64},
    "pairs of neighbours": {"loop": "kto"},
}
"""Settings of a workload that has a feature, or a setting that needs others."""
WITHOUT: Mapping[str, Settings] = {
    "the Trainer": {"loop": "pytorch"},
    "mode: training": {"mode": "inference"},
    "parallel.strategy: none, ddp": {"parallel.strategy": "fsdp2"},
    "parallel.strategy: none, ddp, zero1": {"parallel.strategy": "fsdp2"},
    "train.train_sampling_strategy: sequential": {"train.train_sampling_strategy": "random"},
    "loop: trainer, pytorch, grpo, sentence_transformers": {"loop": "sft"},
    "more steps than skipped ones": {"steps": 1},
    "a looped schedule": {"parallel.pp_schedule": "GPipe"},
    "several stages on each rank": {"parallel.pp_stages_per_rank": 1},
    "a batch that micro-batches divide": {"parallel.pp_microbatches": 3},
    "all GPUs in parallel.tp_size": EIGHT,
    "batches for each rank": {"parallel.strategy": "dp"},
    "DDP alone": {"train.fsdp": True, "train.fsdp_config": {"version": 1}},
    "4 bits by the Trainer's FSDP": {"train.fsdp": True, "train.fsdp_config": {"version": 1}},
    "checkpoints that are evaluated": {"train.eval_strategy": "no"},
}
"""Settings of a workload without a feature that the defaults have."""
CANDIDATES = (
    True,
    False,
    2,
    3.0,
    "steps",
    "a:b",
    "a=1",
    ["x"],
    {},
    "pinned",
    "2022",
    "cpu",
    "alltoall",
    "dynamic",
    "GPipe",
)
CANDIDATES += ("all", "float16", {"version": 2}, {"peft_type": "VERA"}, 0.5, "max_length")

SURROUNDINGS: tuple[Settings, ...] = (
    {},
    {"model.lora": {"r": 4}},
    LENGTHS,
    {**LENGTHS, "data.sequence_length": 128},
    {"loop": "pytorch"},
    {"parallel.gpus": 4},
    {**EIGHT, "parallel.tp_size": 2},
    {**TWO, "parallel.strategy": "fsdp2"},
    {"loop": "pytorch", **EIGHT, "parallel.tp_size": 2, "parallel.strategy": "fsdp2"},
)
"""Settings of workloads in which a rule may need to be broken, because others come first."""
NEEDED: Mapping[str, Settings] = {"": {"model": {"id": "gpt2"}}, "model": {"factory": "a:b"}}
"""Keys without which a section is not valid."""

RULES = [(subject, rule) for subjects in table().values() for subject in subjects.values() for rule in subject.rules]


def settings_with(name: str) -> Settings:
    """Return settings of a workload that has a feature or a combination of features."""
    if name in EXAMPLES:
        return EXAMPLES[name]
    if " or " in name and name not in FEATURES:
        return settings_with(name.split(" or ")[0])
    if " and " in name and name not in FEATURES:
        return {key: value for part in name.split(" and ") for key, value in settings_with(part).items()}
    if name.startswith("not "):
        return settings_without(name.removeprefix("not "))
    key, _, values = name.partition(": ")
    if values:
        value = values.split(", ")[0]
        return {key: {"true": True, "false": False, "1": 1, "none": None}.get(value, value)}
    return {} if not name else {name: another_value(name)}


def settings_without(name: str) -> Settings:
    """Return settings of a workload that lacks a feature or a combination of features."""
    if name in WITHOUT or name in FEATURES:
        return WITHOUT.get(name, {})
    if " or " in name:
        return {key: value for part in name.split(" or ") for key, value in settings_without(part).items()}
    if " and " in name:
        return next(filter(None, map(settings_without, name.split(" and "))), {})
    return settings_with(name.removeprefix("not ")) if name.startswith("not ") else {}


def another_value(name: str) -> Any:
    """Return a value of a setting that differs from its default."""
    section, _, key = name.rpartition(".")
    if section == "trl":
        return True
    holder = section_at(Workload, tuple(section.split(".")) if section else ())
    assert holder is not None, name
    field = keys(holder)[key]
    for value in CANDIDATES:
        try:
            found = holder.model_validate({**NEEDED.get(section, {}), key: value})
        except (ValidationError, WorkloadError):
            continue
        attribute = next(each for each, other in holder.model_fields.items() if key_of(each, other) == key)
        if getattr(found, attribute) != field.get_default(call_default_factory=True):
            return value
    raise AssertionError(f"no value of {name} is known: add one to CANDIDATES")


def problems_of(settings: Settings) -> list[str]:
    """Return what is wrong with a workload of these settings."""
    mapping: dict[str, Any] = {"model": {"id": "gpt2"}}
    for key, value in settings.items():
        set_key(mapping, tuple(key.split(".")), value)
    try:
        Workload.from_mapping(mapping)
    except WorkloadError as error:
        return str(error).splitlines()
    return []


def pattern_of(rule: Rule) -> str:
    """Return a regular expression of the message of a rule, whose facts may be anything."""
    parts = re.split(r"(?<!\{)\{[^{}]+\}(?!\})", rule.message)
    return ".*".join(re.escape(part.replace("{{", "{").replace("}}", "}")) for part in parts)


def breaking(subject: Subject, rule: Rule) -> Iterator[Settings]:
    """Yield settings of workloads that break a rule, in surroundings and in orders in which one replaces another."""
    parts = [settings_with(subject.when), settings_with(rule.refuse), settings_with(rule.with_)]
    parts.append(settings_without(rule.without))
    for around, order in product(SURROUNDINGS, ((0, 1, 2, 3), (3, 2, 1, 0), (1, 0, 2, 3), (2, 3, 0, 1))):
        yield around | {key: value for index in order for key, value in parts[index].items()}
        yield {key: value for index in order for key, value in parts[index].items()} | around


@pytest.mark.parametrize(
    ("subject", "rule"), RULES, ids=lambda each: getattr(each, "key", getattr(each, "title", None))
)
def test_every_rule_can_fire(subject: Subject, rule: Rule) -> None:
    pattern = re.compile(f"{re.escape(rule.key)}: (.*; )?{pattern_of(rule)}")
    assert any(pattern.match(line) for settings in breaking(subject, rule) for line in problems_of(settings))


def test_no_rule_refuses_what_is_predicted() -> None:
    for row in training_cases():
        row.workload()  # raises an error that names the rule


def test_every_name_of_the_table_is_known() -> None:
    named = {name for subject, rule in RULES for name in (subject.when, rule.refuse, rule.with_, rule.without) if name}
    terms = {term for name in named for term in ([name] if name in FEATURES else re.split(" or | and ", name))}
    terms = {
        term.removeprefix("not ").partition(": ")[0] if ": " in term else term.removeprefix("not ") for term in terms
    }
    assert terms >= FEATURES.keys(), "a feature that no rule names"
    for key in terms - FEATURES.keys():
        section, _, name = key.rpartition(".")
        holder = section_at(Workload, (section,) if section else ())
        assert section == "trl" or (holder is not None and name in keys(holder)), key
    facts = {fact for _, rule in RULES for fact in re.findall(r"(?<!\{)\{(\w+)", rule.message)}
    assert facts - {"name"} == FACTS.keys()


_PAUSES = (
    "eval_strategy do_eval eval_on_start eval_accumulation_steps eval_do_concat_batches prediction_loss_only "
    "batch_eval_metrics include_for_metrics predict_with_generate generation_max_length generation_num_beams "
    "save_strategy save_total_limit save_only_model load_best_model_at_end resume_from_checkpoint"
).split()
"""Settings of the Trainer's evaluations and checkpoints."""


def test_a_plain_loop_refuses_what_the_trainer_does_between_its_steps() -> None:
    refused = {rule.refuse for _, rule in RULES if rule.with_ == "loop: pytorch"}
    assert refused >= {f"train.{name}" for name in _PAUSES}


def test_options_of_a_strategy() -> None:
    assert belongs_to("static_graph", "ddp") and not belongs_to("static_graph", "zero1")
    assert belongs_to("offload_policy", "fsdp2") and not belongs_to("offload_policy", "fsdp1")
    assert belongs_to("tp_size", "dp")
