"""Names and defaults match the installed transformers and peft."""

from __future__ import annotations

import dataclasses
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from trainatomy.errors import MissingLibrary, WorkloadError
from trainatomy.libraries import import_library
from trainatomy.training.process import preload
from trainatomy.workload import LoraSpec, TrainSpec, Workload
from trainatomy.workload.arguments import NEW_NAMES, arguments


def defaults(options: Any) -> dict[str, Any]:
    """Return the names and defaults of a dataclass of options."""
    return {
        field.name: field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
        for field in dataclasses.fields(options)
    }


@pytest.fixture(scope="module")
def training_arguments() -> dict[str, Any]:
    return defaults(pytest.importorskip("transformers.training_args").TrainingArguments)


def test_keys_of_train_have_the_defaults_of_training_arguments(training_arguments: dict[str, Any]) -> None:
    ours = {name: field.default for name, field in TrainSpec.model_fields.items()}
    ours["per_device_eval_batch_size"] = ours[
        "per_device_train_batch_size"
    ]  # trainatomy's default: the same as in training
    assert ours.pop("gradient_checkpointing_every") == 1  # in transformers a key of gradient_checkpointing_kwargs
    assert ours.pop("dynamo_use_regional_compilation") is False  # in accelerate's configuration
    ours["include_for_metrics"] = list(ours["include_for_metrics"])
    ours["save_strategy"] = training_arguments["save_strategy"]  # trainatomy's default: None, nothing is counted
    for name in ("predict_with_generate", "generation_max_length", "generation_num_beams"):  # of Seq2SeqTrainer
        assert not ours.pop(name)
    for name in ("max_steps", "num_train_epochs", "eval_steps"):  # trainatomy's default: how long it takes is not said
        assert ours.pop(name) is None
    ours["use_cache"] = False  # trainatomy's default: None, the Trainer's default with loop trainer
    theirs = {name: training_arguments[name] for name in ours}
    if theirs["gradient_checkpointing"] is None:  # since transformers 5.24, where it is the old name of another key
        theirs["gradient_checkpointing"] = bool(training_arguments["activation_checkpointing"])
    assert {**theirs, "optim": str(getattr(theirs["optim"], "value", theirs["optim"]))} == ours


def test_every_training_argument_is_known_in_one_way(training_arguments: dict[str, Any]) -> None:
    known = arguments()
    keys = set(TrainSpec.model_fields)
    sequence_to_sequence = defaults(pytest.importorskip("transformers").Seq2SeqTrainingArguments)
    assert set(training_arguments) | set(sequence_to_sequence) <= keys | set(known.names()) | NEW_NAMES.keys()
    assert not keys & set(known.names())
    assert len(known.names()) == len(set(known.names()))


def test_every_argument_that_is_not_a_key_has_a_reason() -> None:
    known = arguments()
    for name in known.names():
        reason = known.ignored.get(name) or known.not_simulated.get(name) or known.renamed.get(name)
        assert reason or known.refusal_of(name), name


CHANGES: dict[str, Any] = {
    "accelerator_config": {"split_batches": True},
    "auto_find_batch_size": True,
    "ddp_backend": "gloo",
    "debug": "underflow_overflow",
    "dispatch_batches": True,
    "full_determinism": True,
    "half_precision_backend": "apex",
    "label_names": ["start_positions"],
    "past_index": 1,
    "generation_config": "generation_config.json",
    "skip_memory_metrics": False,
    "split_batches": True,
    "torchdynamo": "inductor",
    "use_cpu": True,
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_value_that_changes_memory_or_time_is_noted_or_refused(name: str) -> None:
    try:
        train = TrainSpec.model_validate({name: CHANGES[name]})
    except ValueError:
        reason = arguments().refusal_of(name)
    else:
        reason = "; ".join(train.notes())
    assert reason


@pytest.mark.parametrize(
    ("name", "value", "accepted"),
    [
        ("accelerator_config", {"even_batches": False, "non_blocking": True, "split_batches": False}, True),
        ("accelerator_config", {"dispatch_batches": True}, False),
        ("accelerator_config", {"gradient_accumulation_kwargs": {"sync_each_batch": True}}, False),
        ("accelerator_config", "accelerator.json", False),
        ("skip_memory_metrics", True, True),
        ("skip_memory_metrics", "false", False),
        ("ddp_backend", "nccl", True),
        ("past_index", "-1", True),
    ],
)
def test_some_arguments_are_accepted_with_values_that_change_nothing(name: str, value: Any, accepted: bool) -> None:
    assert arguments().is_unapplied(name, value) is accepted
    if not accepted:
        with pytest.raises(WorkloadError, match=f"train.{name}: not supported: "):
            Workload.from_mapping({"model": {"id": "gpt2"}, "train": {name: value}})


@pytest.mark.parametrize(("given", "read"), [(True, "all"), (False, "no"), ("non_padding", "non_padding")])
def test_counted_tokens_are_read_as_by_transformers(given: Any, read: str) -> None:
    assert TrainSpec.model_validate({"include_num_input_tokens_seen": given}).include_num_input_tokens_seen == read


def test_training_arguments_at_their_defaults_are_accepted(training_arguments: dict[str, Any]) -> None:
    TrainSpec.model_validate({name: getattr(value, "value", value) for name, value in training_arguments.items()})


def test_every_optimizer_of_transformers_is_known() -> None:
    names = {each.value for each in pytest.importorskip("transformers.training_args").OptimizerNames}
    known = arguments()
    assert names <= set(known.optimizers) | set(known.refused_optimizers)
    assert not set(known.optimizers) & set(known.refused_optimizers)


def test_keys_of_lora_have_the_defaults_of_peft() -> None:
    theirs = defaults(pytest.importorskip("peft").LoraConfig)
    for name, value in LoraSpec().model_dump().items():
        assert theirs[name] == value, name


def test_a_library_that_cannot_be_imported_is_not_said_to_be_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "half_there.py").write_text("import not_there_at_all\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(MissingLibrary, match="installed but cannot be imported: No module named 'not_there_at_all'"):
        import_library("half_there", "this")
    with pytest.raises(MissingLibrary, match="this needs not_there_at_all, which is not installed: pip install it"):
        import_library("not_there_at_all", "this", install="it")


def test_the_first_cause_of_a_library_that_does_not_work_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "built_for_another.py").write_text("raise RuntimeError('operator other::nms does not exist')\n")
    (tmp_path / "lazy.py").write_text(
        "try:\n    import built_for_another\nexcept Exception as error:\n"
        "    raise ModuleNotFoundError('Could not import module') from error\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    said = r"""RuntimeError: operator other::nms does not exist\n.* python -c "import lazy" succeeds"""
    with pytest.raises(MissingLibrary, match=said):
        import_library("lazy", "loop: trainer")


def test_a_broken_library_under_the_trainer_is_no_bug_of_trainatomy(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> object:
        if name == "transformers.trainer":
            raise RuntimeError("operator torchvision::nms does not exist")
        return import_module(name)

    monkeypatch.setattr("trainatomy.libraries.import_module", broken)
    with pytest.raises(MissingLibrary, match=r"loop: pytorch needs transformers\.trainer, .* torchvision::nms"):
        preload(Workload.from_mapping({"model": {"id": "openai-community/gpt2"}, "loop": "pytorch"}))
