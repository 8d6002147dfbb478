"""Architectures: each file is in the index, and the model that transformers builds has the published size."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from trainatomy.catalog.architectures import Architecture, architecture, architectures, nearest

ENTRIES = architectures()
FOLDER = Path(sys.modules[Architecture.__module__].__file__ or "").parent / "architectures"

# One of each family, small enough to build at once; the classifier's count was also read from a GPU run.
SAMPLE = [
    "google-bert/bert-large-uncased",
    "FacebookAI/roberta-base",
    "distilbert/distilbert-base-uncased",
    "openai-community/gpt2",
    "meta-llama/Llama-3.2-1B",
    "meta-llama/Llama-3.1-405B",
    "Qwen/Qwen2.5-0.5B",
    "Qwen/Qwen3-0.6B",
    "mistralai/Mistral-7B-v0.1",
    "mistralai/Mixtral-8x7B-v0.1",
    "google/gemma-2b",
    "google/gemma-2-2b",
    "google/gemma-3-1b-pt",
    "microsoft/phi-2",
    "google-t5/t5-base",
    "google/flan-t5-base",
    "openai/whisper-large-v3",
    "google/vit-base-patch16-224",
    "facebook/deit-base-distilled-patch16-224",
    "microsoft/resnet-50",
    "facebook/opt-125m",
    "EleutherAI/pythia-160m",
]


def build(config, class_name):
    """Return the class of the model built on the meta device and its number of parameters."""
    import torch
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    fields = {key: value for key, value in config.items() if key != "model_type"}
    with torch.device("meta"):
        model = getattr(transformers, class_name)(CONFIG_MAPPING[config["model_type"]](**fields))
    return sum(parameter.numel() for parameter in model.parameters())


def test_the_index_names_exactly_the_files():
    files = {path.name for path in FOLDER.glob("*.json")} - {"index.json"}
    assert files == {f"{entry.hub_id.replace('/', '--')}.json" for entry in ENTRIES}


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.hub_id)
def test_index_and_file_agree(entry):
    found = architecture(entry.hub_id)
    assert found is not None and found.entry is entry
    assert found.config["architectures"] == [entry.class_name] and found.config["model_type"] == entry.model_type
    assert entry.source == f"https://huggingface.co/{entry.hub_id}"
    if entry.parameters_published is not None and not entry.note:
        assert entry.parameters == entry.parameters_published


@pytest.mark.parametrize("hub_id", SAMPLE)
def test_built_models_have_the_size_in_the_index(hub_id):
    found = architecture(hub_id)
    assert found is not None
    assert build(found.config, found.class_name) == found.parameters


def test_a_classifier_on_berts_configuration_has_the_size_of_the_gpu_run():
    found = architecture("bert-large-uncased")
    assert found is not None
    assert build(found.config, "BertForSequenceClassification") == 335143938


@pytest.mark.parametrize(
    ("published", "hub_id"),
    [
        (124439808, "openai-community/gpt2"),
        (8030261248, "meta-llama/Llama-3.1-8B"),
        (405853388800, "meta-llama/Llama-3.1-405B"),
        (494032768, "Qwen/Qwen2.5-0.5B"),
        (46702792704, "mistralai/Mixtral-8x7B-v0.1"),
        (222903552, "google-t5/t5-base"),
        (1543490560, "openai/whisper-large-v3"),
        (86567656, "google/vit-base-patch16-224"),
        (2506172416, "google/gemma-2b"),
    ],
)
def test_published_sizes(published, hub_id):
    assert next(entry for entry in ENTRIES if entry.hub_id == hub_id).parameters == published


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("bert-large-uncased", "google-bert/bert-large-uncased"),
        ("gpt2", "openai-community/gpt2"),
        ("Meta-Llama/llama-3.1-8b", "meta-llama/Llama-3.1-8B"),
        ("meta-llama/Meta-Llama-3.1-405B", "meta-llama/Llama-3.1-405B"),
        ("Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-7B"),
        ("t5-base", "google-t5/t5-base"),
    ],
)
def test_short_old_and_chat_names(name, found):
    entry = architecture(name)
    assert entry is not None and entry.hub_id == found


def test_unknown_names():
    assert architecture("somebody/else") is None
    assert architecture("facebook/gpt2") is None
    assert nearest("bert-larg-uncased")[0] == "google-bert/bert-large-uncased"
    assert nearest("lama-3.1-8b")[0] == "meta-llama/Llama-3.1-8B"
    assert nearest("qqqqqqq") == []


def test_finding_one_reads_two_files_and_loads_no_library():
    code = (
        "import json, sys; from trainatomy.catalog import architectures as a; reads = []; read = a.read_text;"
        "a.read_text = lambda *path: (reads.append(path), read(*path))[1]; a.architecture('gpt2');"
        "print(json.dumps([len(reads), [m for m in ('torch', 'transformers', 'numpy') if m in sys.modules]]))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(result.stdout) == [2, []]
