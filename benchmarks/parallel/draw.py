"""Draw trainings on several GPUs at random: ``python benchmarks/parallel/draw.py --seed 5 --count 39 > drawn.yaml``.

The ways of spreading a training take turns: DDP, FSDP of both versions, ZeRO-1, DataParallel, tensor, sequence,
context and expert parallelism and pipelines, in plain loops and in the Trainer.  A seed chooses the model among
families of transformers and modules as users write them, and the options of the strategy, precision, optimizer, batch,
length, checkpointing, accumulation and adapters.  Nothing is left out because it cannot be predicted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from typing import Any

import yaml

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "settings"))

from draw_practice import DECODERS, FAMILIES, QUANTISED  # noqa: E402 - lies in the folder above
from draw_settings import OTHER_MODELS, TASKS, TEXT_MODELS, UNTEXTUAL, Plain  # noqa: E402

Case = dict[str, Any]
FOLDER = "benchmarks/settings"
MODULES = ("live_modules", "further_modules", "unusual_modules")
SHIPPED: dict[str, tuple[str, dict[str, Any]]] = {
    "google-bert/bert-base-uncased": ("BertForSequenceClassification", {}),
    "FacebookAI/roberta-base": ("RobertaForMaskedLM", {}),
    "distilbert/distilbert-base-uncased": ("DistilBertForTokenClassification", {}),
    "openai-community/gpt2": ("GPT2LMHeadModel", {}),
    "openai-community/gpt2-medium": ("GPT2LMHeadModel", {}),
    "meta-llama/Llama-3.2-1B": ("LlamaForCausalLM", {"num_hidden_layers": 4}),
    "Qwen/Qwen2.5-0.5B": ("Qwen2ForCausalLM", {"num_hidden_layers": 8}),
    "Qwen/Qwen3-0.6B": ("Qwen3ForCausalLM", {"num_hidden_layers": 8}),
    "google/gemma-3-1b-pt": ("Gemma3ForCausalLM", {"num_hidden_layers": 6}),
    "google-t5/t5-small": ("T5ForConditionalGeneration", {}),
    "google/flan-t5-base": ("T5ForConditionalGeneration", {}),
    "EleutherAI/pythia-160m": ("GPTNeoXForCausalLM", {}),
    "facebook/opt-125m": ("OPTForCausalLM", {}),
    "openai/whisper-tiny": ("WhisperForConditionalGeneration", {}),
    "google/vit-base-patch16-224": ("ViTForImageClassification", {}),
    "facebook/deit-base-patch16-224": ("ViTForImageClassification", {}),
    "microsoft/resnet-50": ("ResNetForImageClassification", {}),
}
"""Models of the catalog by their class, with fewer layers where they are large."""
PLANNED: dict[str, dict[str, Any]] = {
    **{name: DECODERS[name] for name in DECODERS if name != "StableLmForCausalLM"},
    **{name: TEXT_MODELS[name] for name in ("Gemma3ForCausalLM", "Phi3ForCausalLM", "GPTNeoXForCausalLM")},
    **{name: TASKS[name] for name in ("Cohere2ForCausalLM", "Olmo2ForCausalLM")},
}
"""Decoders that transformers has a plan for."""
MIXTURES: dict[str, dict[str, Any]] = {
    "Qwen3MoeForCausalLM": FAMILIES["Qwen3MoeForCausalLM"][0],
    "OlmoeForCausalLM": FAMILIES["OlmoeForCausalLM"][0],
    "DeepseekV3ForCausalLM": FAMILIES["DeepseekV3ForCausalLM"][0],
    "MixtralForCausalLM": TEXT_MODELS["MixtralForCausalLM"],
    "GptOssForCausalLM": TASKS["GptOssForCausalLM"],
}
OPTIMIZERS = (
    *("adamw_torch_fused", "adamw_torch_fused", "adamw_torch_fused", "adamw_torch", "adamw_torch", "adafactor", "sgd"),
    *("rmsprop", "adagrad", "torch.optim.NAdam"),
)
"""None of bitsandbytes: each case with one would have to start its processes anew, as with options of the allocator."""
ADAPTERS: tuple[dict[str, Any], ...] = (
    {"r": 16},
    {"r": 8, "target_modules": "all-linear", "lora_dropout": 0.1},
    {"r": 32, "target_modules": "all-linear", "use_rslora": True},
)
MESHES: dict[int, tuple[dict[str, Any], ...]] = {
    2: ({},),
    4: ({}, {"dp_replicate_size": 2}, {"dp_shard_size": 2}, {"tp_size": 2}),
    8: ({}, {"dp_replicate_size": 2}, {"dp_shard_size": 2}, {"tp_size": 2}, {"tp_size": 2, "dp_replicate_size": 2}),
}


def any_model(random: Random) -> tuple[str, Case]:
    """Draw a model of any family."""
    kind = random.choice(["shipped", "shipped", "decoder", "text", "family", "task", "other", "module"])
    if kind == "module":
        module = __import__(random.choice(MODULES))
        name = random.choice(sorted(module.BATCHES))
        file = f"{FOLDER}/{module.__name__}.py"
        return name, {
            "model": {"factory": f"{file}:{name}"},
            "data": {"factory": f"{file}:{module.BATCHES[name]}"},
            "train": {"per_device_train_batch_size": random.choice([10, 40, 96, 200])},
        }
    if kind == "shipped":
        name = random.choice(sorted(SHIPPED))
        of_class, config = SHIPPED[name]
        model = {"id": name, "class": of_class, **({"config": config} if config else {})}
        textual = not any(part in of_class for part in ("Image", "Whisper"))
        return name.rpartition("/")[2], {"model": model, **_batch(random, textual, 8)}
    pools: dict[str, Mapping[str, Any]] = {"decoder": DECODERS, "text": TEXT_MODELS, "family": FAMILIES}
    pool = pools.get(kind) or {"task": TASKS, "other": OTHER_MODELS}[kind]
    name = random.choice(sorted(pool))
    config, length = pool[name] if kind == "family" else (pool[name], None)
    textual = length is not None if kind == "family" else kind != "other" and not any(p in name for p in UNTEXTUAL)
    case = {"model": {"class": name, **({"config": config} if config else {})}, **_batch(random, textual, 12)}
    if length is not None:
        case["data"] = {"sequence_length": length}
    return name, case


def _batch(random: Random, textual: bool, most: int) -> Case:
    """Draw a batch of texts or of other samples."""
    case: Case = {"train": {"per_device_train_batch_size": random.choice([1, 2, 3, 4, 6, 8, most])}}
    if textual:
        case["data"] = {"sequence_length": random.choice([64, 96, 128, 200, 256, 384, 500])}
        case["data"] |= random.choice([{}, {}, {}, {"padding": True}])
    return case


def ddp(random: Random, gpus: int) -> tuple[str, Case]:
    """Draw DDP in a plain loop."""
    name, case = any_model(random)
    options: tuple[dict[str, Any], ...] = (
        {"gradient_as_bucket_view": True},
        {"static_graph": True},
        {"find_unused_parameters": True},
        {"bucket_cap_mb": random.choice([1, 10, 60])},
        {"broadcast_buffers": False},
    )
    chosen = random.sample(options, random.choice([0, 1, 1, 2]))
    case |= {"loop": "pytorch", "parallel": {key: value for each in chosen for key, value in each.items()}}
    return name, with_accumulation(with_adapters(case, random), random, each=True)


def ddp_trainer(random: Random, gpus: int) -> tuple[str, Case]:
    """Draw DDP in the Trainer."""
    name, case = any_model(random)
    options: tuple[dict[str, Any], ...] = (
        {"ddp_find_unused_parameters": random.random() < 0.5},
        {"ddp_bucket_cap_mb": random.choice([5, 50])},
        {"ddp_broadcast_buffers": True},
        {"ddp_static_graph": True},
        {"average_tokens_across_devices": False},
        {"eval_strategy": "steps", "per_device_eval_batch_size": 6},
        {"save_strategy": "steps"},
        {"torch_empty_cache_steps": 1},
    )
    for each in random.sample(options, random.choice([0, 1, 1, 2])):
        case["train"] |= each
    case["parallel"] = {}
    return name, with_accumulation(with_adapters(case, random), random)


def fsdp2(random: Random, gpus: int) -> tuple[str, Case]:
    """Draw FSDP2 in a plain loop: dtypes, resharding, shards in host memory, replicas, tensor parallelism."""
    mesh = random.choice(MESHES[gpus])
    name, case = planned(random) if "tp_size" in mesh else any_model(random)
    parallel = {"strategy": "fsdp2", **mesh, **_mixed(random)}
    if random.random() < 0.4:
        parallel["reshard_after_forward"] = random.choice([True, False, *([2] if gpus > 2 and not mesh else [])])
    if random.random() < 0.2:
        parallel["offload_policy"] = "cpu"
    case |= {"loop": "pytorch", "parallel": parallel}
    return name, with_accumulation(with_adapters(case, random), random, each=True)


def fsdp1(random: Random, gpus: int) -> tuple[str, Case]:
    """Draw FSDP1 in a plain loop."""
    name, case = any_model(random)
    parallel = {"strategy": "fsdp1", **_mixed(random)}
    if random.random() < 0.3:
        parallel["reshard_after_forward"] = False
    case |= {"loop": "pytorch", "parallel": parallel}
    return name, with_accumulation(with_adapters(case, random), random, each=True)


def fsdp_trainer(random: Random, gpus: int) -> tuple[str, Case]:
    """Draw FSDP of either version in the Trainer, with the keys of ``fsdp_config`` that accelerate's users set."""
    name, case = any_model(random)
    version = random.choice([1, 2, 2])
    reshard: list[Any] = [True, False] if version == 2 else ["full_shard", "shard_grad_op", "no_shard"]
    options: tuple[dict[str, Any], ...] = (
        {"reshard_after_forward": random.choice(reshard)},
        {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP"},
        {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": random.choice([100_000, 2_000_000])},
        {"auto_wrap_policy": "NO_WRAP"},
        {"activation_checkpointing": True},
        {"cpu_offload": True},
        {"backward_prefetch": random.choice(["BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"])},
        {"forward_prefetch": True},
        {"limit_all_gathers": False},
        {"use_orig_params": random.random() < 0.5},
        {"cpu_ram_efficient_loading": True, "sync_module_states": True},
        {"state_dict_type": random.choice(["FULL_STATE_DICT", "SHARDED_STATE_DICT"])},
    )
    config: dict[str, Any] = {"version": version} if version == 1 or random.random() < 0.5 else {}
    for each in random.sample(options, random.choice([0, 1, 2, 3])):
        config |= each
    case["train"] |= {"fsdp": True} | ({"fsdp_config": config} if config else {})
    if random.random() < 0.2:
        case["train"] |= random.choice([{"eval_strategy": "steps"}, {"save_strategy": "steps"}])
    case["parallel"] = {}
    return name, with_accumulation(with_adapters(case, random), random)


def zero1(random: Random, gpus: int) -> tuple[str, Case]:
    """Draw PyTorch's ``ZeroRedundancyOptimizer``."""
    name, case = any_model(random)
    view = {"gradient_as_bucket_view": True} if random.random() < 0.4 else {}
    case |= {"loop": "pytorch", "parallel": {"strategy": "zero1", **view}}
    return name, with_accumulation(with_adapters(case, random), random, each=True)


def dp(random: Random, gpus: int) -> tuple[str, Case]:
    """Draw ``DataParallel``."""
    name, case = any_model(random)
    case |= {"parallel": {"strategy": "dp"}} | ({"loop": "pytorch"} if random.random() < 0.5 else {})
    return name, with_accumulation(with_adapters(case, random), random)


def planned(random: Random, models: Mapping[str, dict[str, Any]] = PLANNED) -> tuple[str, Case]:
    """Draw a decoder that has a plan; embeddings of its own for the output layer more often than not."""
    name = random.choice(sorted(models))
    config = {**models[name], "num_hidden_layers": random.choice([2, 4]), "num_attention_heads": 8, "hidden_size": 512}
    config |= {"num_key_value_heads": 4} if "num_key_value_heads" in config else {}
    if name == "DeepseekV3ForCausalLM":
        config["num_key_value_heads"] = 8
    config |= {"tie_word_embeddings": False} if random.random() < 0.7 else {}
    data = {"sequence_length": random.choice([128, 256, 512, 1024])}
    train = {"per_device_train_batch_size": random.choice([2, 4, 8])}
    return name, {"model": {"class": name, "config": config}, "data": data, "train": train}


def tensor(random: Random, gpus: int) -> tuple[str, Case]:
    """Draw tensor parallelism, with sequence parallelism or in the Trainer."""
    name, case = planned(random)
    if random.random() < 0.3:
        return name, {**case, "parallel": {"tp_size": gpus}}
    sequences = {"sequence_parallel": True} if random.random() < 0.5 else {}
    return name, case | {"loop": "pytorch", "parallel": {"tp_size": gpus, **sequences}}


def context(random: Random, gpus: int) -> tuple[str, Case]:
    """Draw context parallelism, in a plain loop or in the Trainer."""
    name, case = planned(random)
    case["data"]["sequence_length"] = random.choice([1024, 2048, 4096])
    rotation = {"cp_comm_strategy": "alltoall"} if random.random() < 0.4 else {}
    if random.random() < 0.4:
        case["train"]["fsdp"] = True
        return name, case | {"parallel": {"cp_size": 2, **rotation}}
    return name, case | {
        "loop": "pytorch",
        "parallel": {"strategy": "fsdp2", "cp_size": 2, **rotation, **_mixed(random)},
    }


def experts(random: Random, gpus: int) -> tuple[str, Case]:
    """Draw expert parallelism."""
    name, case = planned(random, MIXTURES)
    mesh = {"tp_size": 2, "strategy": "fsdp2"} if gpus > 2 else {"tp_size": 2}
    return name, case | {"loop": "pytorch", "parallel": {"enable_expert_parallel": True, **mesh}}


def pipeline(random: Random, gpus: int) -> tuple[str, Case]:
    """Draw a pipeline of any schedule; on more than two GPUs with data-parallel or tensor-parallel ranks."""
    name, case = planned(random)
    case["model"]["config"] |= {"num_hidden_layers": random.choice([4, 8]), "tie_word_embeddings": False}
    case["train"]["per_device_train_batch_size"] = random.choice([4, 8, 16])
    schedule = random.choice(["GPipe", "1F1B", "1F1B", "LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble"])
    further: tuple[dict[str, Any], ...] = ({},)
    if gpus > 2:
        further = ({"strategy": "ddp"}, {"strategy": "fsdp2"}, {"tp_size": 2, "strategy": "fsdp2"})
    parallel = {"pp_size": 2, "pp_schedule": schedule, **random.choice(further)}
    parallel |= {"pp_microbatches": 4} if random.random() < 0.5 else {}
    return name, case | {"loop": "pytorch", "parallel": parallel}


def _mixed(random: Random) -> dict[str, Any]:
    """Draw the dtypes of FSDP."""
    chosen = random.choice([None, None, {"param_dtype": "bfloat16"}, {"reduce_dtype": "bfloat16"}, "both", "fp16"])
    dtypes = {
        "both": {"param_dtype": "bfloat16", "reduce_dtype": "float32"},
        "fp16": {"param_dtype": "float16", "reduce_dtype": "float16"},
    }
    return {} if chosen is None else {"mp_policy": dtypes[chosen] if isinstance(chosen, str) else chosen}


def with_adapters(case: Case, random: Random) -> Case:
    """Add LoRA to some decoders, and quantised weights to some of these."""
    model = case["model"]
    if "CausalLM" in model.get("class", "") and random.random() < 0.35 and "Bloom" not in model["class"]:
        model["lora"] = random.choice(ADAPTERS)
        if random.random() < 0.3:
            model |= {"quantization": random.choice(QUANTISED), "dtype": "bfloat16"}
    return case


def with_accumulation(case: Case, random: Random, *, each: bool = False) -> Case:
    """Add accumulation to some cases; ``each``: with a reduction after every micro-batch in some of them."""
    if random.random() < 0.3 and not (case["parallel"].get("static_graph") or case["train"].get("ddp_static_graph")):
        case["train"]["gradient_accumulation_steps"] = random.choice([2, 3, 4])
        if each and random.random() < 0.4:
            case["parallel"]["sync_each_batch"] = True
    return case


def with_settings(case: Case, random: Random) -> Case:
    """Add precision, optimizer and checkpointing."""
    train, model, parallel = case["train"], case["model"], case["parallel"]
    precision = random.choice(["bf16", "bf16", "bf16", "fp16", "fp32", "tf32", "pure"])
    if precision == "fp16" and parallel.keys() & {"tp_size", "pp_size"}:
        precision = "bf16"  # no gradient scaler of PyTorch serves these
    if precision == "pure" and "factory" not in model:
        model.setdefault("dtype", "bfloat16")
    elif precision not in ("fp32", "pure") and "mp_policy" not in parallel:
        train[precision] = True
    train["optim"] = random.choice(OPTIMIZERS)
    if "factory" not in model and random.random() < 0.35 and "ResNet" not in model["class"]:
        train["gradient_checkpointing"] = True
        reentrant = {"gradient_checkpointing_kwargs": {"use_reentrant": random.random() < 0.5}}
        train |= reentrant if random.random() < 0.4 else {}
    elif "quantization" in model:
        train["gradient_checkpointing"] = False  # peft would switch it on
    if random.random() < 0.15:
        train["max_grad_norm"] = 0
    return case


KINDS: tuple[Callable[[Random, int], tuple[str, Case]], ...] = (
    *(ddp, fsdp_trainer, fsdp2, ddp_trainer, fsdp1, tensor, zero1, fsdp_trainer, context, dp, fsdp2, pipeline, experts),
)


def main() -> int:
    """Print the cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--count", type=int, default=39)
    parser.add_argument("--gpus", default="2", help="numbers of GPUs to choose from, separated by commas")
    options = parser.parse_args()
    numbers = [int(each) for each in options.gpus.split(",")]
    cases: dict[str, Case] = {}
    for number in range(options.count):
        random = Random(f"parallel {options.seed} {number}")
        kind, gpus = KINDS[number % len(KINDS)], random.choice(numbers)
        name, case = kind(random, gpus)
        named = f"{kind.__name__}-{name}-{number}-drawn-{options.seed}".lower().replace("_", "-")
        case["parallel"] = {"gpus": gpus, **case["parallel"]}
        cases[named] = with_settings(case, random)
    yaml.dump(
        {"models": {}, "cases": cases}, sys.stdout, Dumper=Plain, sort_keys=False, default_flow_style=None, width=150
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
