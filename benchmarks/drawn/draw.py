"""Draw trainings at random: ``python benchmarks/drawn/draw.py --seed 3 --count 60 > cases/third.yaml``.

A seed chooses model families of transformers that no benchmark has measured yet, and for each of them a head, a
precision, an optimizer, a batch, a length, checkpointing, accumulation, adapters, a loop and allocator settings.
Nothing is chosen by hand, and nothing is left out because it cannot be predicted: refusals are counted.

Models above 400 million parameters keep a few of their layers; those that are larger than 1.6 billion with them, those
whose default configuration cannot be built, and heads without a loss are not drawn.  The first two files of cases were
drawn by an earlier version of this script.
"""

from __future__ import annotations

import argparse
import re
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

import torch
import transformers
import yaml
from transformers.models.auto import modeling_auto
from transformers.utils import logging

HERE = Path(__file__).parent
MEASURED = (HERE.parent / "accuracy" / "grid.yaml", HERE / "records" / "h200.jsonl")
MOST_PARAMETERS, FEWEST_PARAMETERS, LARGE = 1.6e9, 1e5, 4e8
SECONDS = 40
"""Seconds that a model may take to be built."""
NO_LOSS = ("ENCODING", "RETRIEVAL", "KEYPOINT", "MASK_GEN", "WAVEFORM", "SPECTRO", "DEPTH", "POSE", "MATCH", "BACKBONE")
PARTS = ("text_config", "vision_config", "audio_config", "thinker_config", "decoder", "encoder")
DEPTHS = ("num_hidden_layers", "depth", "encoder_layers")
OPTIMIZERS = (
    *["adamw_torch_fused"] * 4,
    *["adamw_torch"] * 2,
    *("sgd", "adafactor", "rmsprop", "adamw_bnb_8bit", "lion_8bit", "adagrad", "paged_adamw_32bit"),
)


def families() -> dict[str, dict[str, str]]:
    """Return the classes of each family of models that was not measured, by the task of their head."""
    found: dict[str, dict[str, str]] = {}
    for mapping in (name for name in dir(modeling_auto) if re.fullmatch(r"MODEL_FOR_\w+_MAPPING_NAMES", name)):
        task = mapping.removeprefix("MODEL_FOR_").removesuffix("_MAPPING_NAMES")
        if task == "IMAGE" or any(part in task for part in NO_LOSS):
            continue
        for family, classes in getattr(modeling_auto, mapping).items():
            found.setdefault(family, {})[task] = classes if isinstance(classes, str) else classes[0]
    measured = {name for file in MEASURED for name in re.findall(r"\bclass\W+(\w+)", file.read_text(encoding="utf-8"))}
    return {family: heads for family, heads in found.items() if not measured & set(heads.values())}


def built(model_class: Any, overrides: Mapping[str, Any]) -> Any:
    """Return a model without data, with these values in place of its configuration's defaults."""
    default = model_class.config_class()
    values = {
        name: {**getattr(default, name).to_dict(), **value} if isinstance(value, dict) else value
        for name, value in overrides.items()
    }
    signal.alarm(SECONDS)
    try:
        with torch.device("meta"):
            return model_class(model_class.config_class(**values))
    finally:
        signal.alarm(0)


def fewer_layers(model_class: Any, layers: int) -> dict[str, Any]:
    """Return values of a configuration with which each part of the model has at most so many layers."""
    default = model_class.config_class()
    overrides: dict[str, Any] = {"num_hidden_layers": layers} if "num_hidden_layers" in default.to_dict() else {}
    for part in PARTS:
        values = getattr(default, part).to_dict() if hasattr(getattr(default, part, None), "to_dict") else {}
        shorter = {name: layers for name in DEPTHS if isinstance(values.get(name), int) and values[name] > layers}
        overrides |= {part: shorter} if shorter else {}
    return overrides


def training(name: str, task: str, random: Random) -> dict[str, Any]:
    """Draw the training of a class of models.

    Raises:
        ValueError: The model is too large or too small.
    """
    model_class = getattr(transformers, name)
    model, overrides = built(model_class, {}), dict[str, Any]()
    if model.num_parameters() > LARGE:
        overrides = fewer_layers(model_class, random.choice([2, 3, 4, 6]))
        model = built(model_class, overrides)
    if not FEWEST_PARAMETERS < model.num_parameters() < MOST_PARAMETERS:
        raise ValueError(f"{model.num_parameters() / 1e9:.1f} billion parameters")
    case: dict[str, Any] = {"model": {"class": name, **({"config": overrides} if overrides else {})}}
    precision = random.choice(["bf16", "bf16", "fp16", "fp32", "pure"])
    train: dict[str, Any] = {"per_device_train_batch_size": random.choice([1, 2, 3, 4, 6, 8, 12])}
    if precision in ("bf16", "fp16"):
        train[precision] = True
    if precision == "pure":
        case["model"]["dtype"] = "bfloat16"
    if random.random() < 0.3 and model_class.supports_gradient_checkpointing:
        train["gradient_checkpointing"] = True
    if random.random() < 0.3:
        train["gradient_accumulation_steps"] = random.choice([2, 3])
    train["optim"] = random.choice(OPTIMIZERS)
    if random.random() < 0.2:
        train["max_grad_norm"] = 0
    if random.random() < 0.25:
        case["loop"] = "pytorch"
    elif random.random() < 0.1:
        train["torch_empty_cache_steps"] = 1
    if "CAUSAL_LM" in task and random.random() < 0.3:
        case["model"]["lora"] = {"r": random.choice([4, 8, 16]), "target_modules": "all-linear"}
    if random.random() < 0.1:
        case["allocator"] = "expandable_segments:True"
    if "input_ids" in model.main_input_name:
        case["data"] = {"sequence_length": random.choice([64, 77, 128, 200, 256, 333, 384, 500])}
    return {**case, "train": train}


def _too_slow(*_: object) -> None:
    raise TimeoutError(f"the model takes more than {SECONDS} s to be built")


def main() -> int:
    """Print the cases; list on stderr what was not drawn, and why."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--count", type=int, default=60)
    options = parser.parse_args()
    logging.set_verbosity_error()
    signal.signal(signal.SIGALRM, _too_slow)
    heads = families()
    names, cases = sorted(heads), dict[str, Any]()
    Random(options.seed).shuffle(names)
    for family in names:
        random = Random(f"{options.seed} {family}")
        task = random.choice(sorted(heads[family]))
        try:
            found = training(heads[family][task], task, random)
        except Exception as error:  # a family that needs other libraries or has no default configuration
            print(f"{family}: {type(error).__name__}: {str(error).splitlines()[0][:100]}", file=sys.stderr)
            continue
        cases[f"{family}-{task.lower().replace('_', '-')}-{options.seed}"] = found
        if len(cases) == options.count:
            break
    yaml.safe_dump(cases, sys.stdout, sort_keys=False, default_flow_style=None, width=150)
    return 0


if __name__ == "__main__":
    sys.exit(main())
