"""A candidate's settings as Python: a ``TrainingArguments(...)`` call, or a plain loop for ``loop: pytorch``.

What ``TrainingArguments`` cannot hold follows as comments with lines of code (``#   ...``), because it belongs where
the model is loaded or the ``Trainer`` is made.  They use names of the user's script: ``model``, ``dataset``, ``texts``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from trainatomy.reporters.export_spread import SpreadCode, spread_code
from trainatomy.results.fit import Candidate
from trainatomy.results.prediction import Plan
from trainatomy.workload.arguments import is_class_path, is_factory, is_own
from trainatomy.workload.loops import LOOPS
from trainatomy.workload.model import LoraSpec
from trainatomy.workload.quantization import QuantizationSpec
from trainatomy.workload.schema import Workload
from trainatomy.workload.sentence_transformers import SentenceTransformersSpec, is_of_sentence_transformers
from trainatomy.workload.train import OWN_KEYS
from trainatomy.workload.trl import applied_settings

OF_TORCH = frozenset({"adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop"})
"""Optimizers of ``torch.optim``, to which the Trainer does not pass ``optim_args`` (trainer_optimizer.py, 5.17)."""

WIDTH = 76
"""Columns of the text, so that it is not folded on a terminal of 80."""

_INDENT = "#   "
"""Text before a line of code in a comment."""

_ALWAYS = ("per_device_train_batch_size", "gradient_accumulation_steps", "gradient_checkpointing")
"""Settings that are written even where they are the defaults, so that they replace those of the user's script."""


def training_arguments_code(candidate: Candidate, name: str) -> str:
    """Return Python code with the settings of a candidate.

    Args:
        candidate: The candidate.
        name: Name of the training, from which ``output_dir`` is made.
    """
    workload = Workload.from_mapping(candidate.workload)
    allocator = _allocator(workload)
    if workload.loop == "pytorch":
        return allocator + plain_loop(workload)
    library, _, kind = LOOPS[workload.loop].arguments.partition(":")
    imported = ", ".join(sorted([kind, *([_trainer_name(workload)] if _trainer_settings(workload) else [])]))
    head = f"from {library} import {imported}\n\n"
    settings = {"output_dir": re.sub(r"[^\w.-]+", "-", name).strip("-.") or "output", **_settings(candidate, workload)}
    lines = _call(f"args = {kind}", _keywords(settings | applied_settings(workload)), width=0)
    return f"{allocator}{head}{_text(lines)}{_comments(_model(workload) + _trainer(workload))}"


def _trainer_name(workload: Workload) -> str:
    return re.sub("Config|TrainingArguments", "Trainer", LOOPS[workload.loop].arguments.partition(":")[2])


def _allocator(workload: Workload) -> str:
    """Return the lines that set the allocator's variable; PyTorch reads it when it first uses the GPU."""
    if not workload.allocator:
        return ""
    variable = f'os.environ["PYTORCH_ALLOC_CONF"] = {_literal(workload.allocator)}'
    return f"import os\n\n# before torch is imported:\n{variable}\n\n"


def _literal(value: Any) -> str:
    """Return a value as Python writes it, with double quotes."""
    if isinstance(value, str):
        return str(json.dumps(value, ensure_ascii=False))
    if isinstance(value, list):
        return f"[{', '.join(map(_literal, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_literal(key)}: {_literal(item)}' for key, item in value.items())}}}"
    return repr(value)


def _call(name: str, arguments: Sequence[str], width: int = WIDTH) -> list[str]:
    """Return the lines of a call: one line, or one for each argument if that is longer than ``width``."""
    line = f"{name}({', '.join(arguments)})"
    return [line] if len(line) <= width else [f"{name}(", *(f"    {argument}," for argument in arguments), ")"]


def _keywords(values: Mapping[str, Any]) -> list[str]:
    return [f"{name}={_literal(value)}" for name, value in values.items()]


def _text(lines: Sequence[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def _settings(candidate: Candidate, workload: Workload) -> dict[str, Any]:
    """Return the keywords of ``TrainingArguments``: what the workload sets, what was changed, and ``_ALWAYS``."""
    changed = [
        key.removeprefix("train.") for each in candidate.changes for key in each.settings if key.startswith("train.")
    ]
    written = dict.fromkeys((*_ALWAYS, *changed, *workload.to_mapping().get("train", {})))
    left_out = set(OWN_KEYS)
    if is_own(workload.train.optim):
        left_out |= {"optim", "optim_args"}
    elif workload.train.optim in OF_TORCH:
        left_out.add("optim_args")
    values = {name: getattr(workload.train, name) for name in written if name not in left_out}
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in values.items()
        if value is not None or name in changed
    }


Section = tuple[str, list[str]]
"""A comment, and the lines of code below it."""


def _comments(sections: list[Section]) -> str:
    """Return sections as comments."""
    parts = []
    for title, code in sections:
        parts += [f"# {title}:" if code else f"# {title}", *(f"{_INDENT}{line}" for line in code)]
    return "\n".join(["", *parts, ""]) if parts else ""


def _model(workload: Workload) -> list[Section]:
    """Return what belongs to loading the model and making the batches."""
    spec, sections = workload.model, list[Section]()
    loading: dict[str, Any] = {"attn_implementation": spec.attn_implementation}
    loading |= {"dtype": None if spec.dtype == "auto" else spec.dtype, **(spec.config if spec.id else {})}
    loading = {key: value for key, value in loading.items() if value is not None}
    if spec.quantization is not None and spec.quantization.is_set:
        sections.append(("quantised weights", _quantization(spec.quantization)))
        where = f"loading the model: {spec.class_ or 'YourModel'}.from_pretrained(..., quantization_config=quantised)"
        sections.append((where, []))
    if loading:
        where = f"loading the model: {spec.class_ or 'YourModel'}.from_pretrained(..., **loading), with"
        sections.append((where, [f"loading = {_literal(loading)}"]))
    if spec.config and not spec.id:
        sections.append(("the model's configuration", [f"configuration = {_literal(dict(spec.config))}"]))
    if spec.freeze:
        sections.append((f"the workload does not train {', '.join(spec.freeze)}", []))
    if spec.freeze_except:
        sections.append((f"the workload trains what begins with {', '.join(spec.freeze_except)} alone", []))
    if spec.float32_parameters:
        names = ", ".join(spec.float32_parameters)
        sections.append((f"the workload casts to float32, once loaded, what begins with {names}", []))
    if spec.enable_input_require_grads:
        sections.append(("after loading the model", ["model.enable_input_require_grads()"]))
    if spec.kernels:
        sections.append((f"the workload replaces layers as axolotl does: {', '.join(spec.kernels)}", []))
    if spec.lora is not None:
        sections.append(("adapters, after loading the model", _prepared(workload) + _adapters(spec.lora)))
    if spec.peft:
        given = _literal({name: value for name, value in spec.peft.items() if name != "peft_type"})
        made = f'PEFT_TYPE_TO_CONFIG_MAPPING["{str(spec.peft["peft_type"]).upper()}"](**{given})'
        lines = ["from peft import get_peft_model", "from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING", ""]
        sections.append(("adapters, after loading the model", [*lines, f"model = get_peft_model(model, {made})"]))
    if is_of_sentence_transformers(workload):
        sections.append(("the loss", _loss(workload.sentence_transformers)))
        if (length := workload.data.sequence_length) is not None:
            sections.append((f"texts of {length:,} tokens", [f"model.max_seq_length = {length}"]))
    elif (length := workload.data.sequence_length) is not None:
        code = f"tokens = tokenizer(texts, truncation=True, max_length={length})"
        sections.append((f"samples of {length:,} tokens", [code]))
    return sections


def _loss(spec: SentenceTransformersSpec) -> list[str]:
    """Return the code of a loss of sentence-transformers."""
    lines = _call(f"loss = losses.{spec.loss}", ["model", *_keywords(spec.arguments())], WIDTH - len(_INDENT))
    dims = list(spec.matryoshka_dims)
    wrapped = [f"loss = losses.MatryoshkaLoss(model, loss, {_literal(dims)})"] if dims else []
    return ["from sentence_transformers import losses", *lines, *wrapped]


def _quantization(quantization: QuantizationSpec) -> list[str]:
    keywords = _keywords(quantization.arguments())
    made = _call("quantised = BitsAndBytesConfig", keywords, WIDTH - len(_INDENT))
    return ["from transformers import BitsAndBytesConfig", *made]


def _prepared(workload: Workload) -> list[str]:
    """Return the call that prepares a quantised model for adapters, where the workload makes it."""
    spec = workload.model.quantization
    if spec is None or not spec.prepare_model_for_kbit_training:
        return []
    name = "prepare_model_for_kbit_training"
    checkpointing = f"use_gradient_checkpointing={workload.train.gradient_checkpointing}"
    made = _call(f"model = {name}", ["model", checkpointing], WIDTH - len(_INDENT))
    return [f"from peft import {name}", *made]


def _adapters(lora: LoraSpec) -> list[str]:
    made = _call("adapters = LoraConfig", _keywords(lora.arguments()), WIDTH - len(_INDENT))
    return ["from peft import LoraConfig, get_peft_model", *made, "model = get_peft_model(model, adapters)"]


def _trainer(workload: Workload) -> list[Section]:
    """Return what belongs to making the ``Trainer``."""
    found = _trainer_settings(workload)
    sections: list[Section] = []
    if found:
        imports = [line for lines, _ in found for line in lines]
        keywords = ["model=model", "args=args", "train_dataset=dataset", *(keyword for _, keyword in found)]
        call = _call(f"trainer = {_trainer_name(workload)}", keywords, WIDTH - len(_INDENT))
        sections.append(("what only the Trainer takes", [*imports, *call]))
    plan = Plan.of(workload.to_mapping())
    if plan.replicas > 1:
        sizes = f"dp_replicate_size={plan.replicas}, dp_shard_size={plan.data_parallel_size // plan.replicas}"
        code = ["from accelerate import ParallelismConfig", f"replicas = ParallelismConfig({sizes})"]
        sections.append(("replicas of the shards: TrainingArguments(..., parallelism_config=replicas), with", code))
    if not workload.zero_grad_set_to_none:
        sections.append(("the workload fills gradients with zeros; the Trainer always releases them", []))
    return sections


def _trainer_settings(workload: Workload) -> list[tuple[list[str], str]]:
    """Return lines of code and the keyword of ``Trainer`` that uses them, for each thing that needs one."""
    train, found = workload.train, list[tuple[list[str], str]]()
    every = train.gradient_checkpointing_every
    if every > 1:
        code = "from trainatomy.integrations import CheckpointEvery"
        found.append(([code], f"callbacks=[CheckpointEvery({every})]"))
    extra = train.optimizer_arguments()
    if is_class_path(train.optim):
        place, _, kind = train.optim.rpartition(".")
        keywords = ", ".join(["model.parameters()", "lr=args.learning_rate", *_keywords(extra)])
        code = f"optimizer = {kind}({keywords})"
        found.append(([f"from {place} import {kind}", code], "optimizers=(optimizer, None)"))
    elif is_factory(train.optim):
        importing, making = _made_by_function(train.optim)
        found.append(([importing, making], "optimizers=(optimizer, None)"))
    elif extra and train.optim in OF_TORCH:
        code = "optimizer, keywords = Trainer.get_optimizer_cls_and_kwargs(args)"
        found.append(([code], f"optimizer_cls_and_kwargs=(optimizer, {{**keywords, {_literal(extra)[1:-1]}}})"))
    return found


def plain_loop(workload: Workload) -> str:
    """Return a function that trains a model in a plain PyTorch loop with the settings of a workload."""
    spread = spread_code(workload)
    several = spread or SpreadCode()
    shares_samples = spread is not None and several.devices == 1
    optimizer_imports, optimizer = _plain_optimizer(workload, sharded=several.shards_optimizer)
    train = workload.train
    body = [
        *([f'torch.backends.fp32_precision = "{"tf32" if train.tf32 else "ieee"}"'] if train.tf32 is not None else []),
        *several.start,
        f"batches = {_plain_batches(train.per_device_train_batch_size * several.devices, several=shares_samples)}",
        *(["model.to(device).train()"] if several.moves else []),
        *_plain_checkpointing(workload),
        *several.spread,
        *optimizer,
        *(["scaler = torch.amp.GradScaler(device)"] if train.fp16 else []),
        "for number, batch in enumerate(batches, 1):",
        "    batch = {name: value.to(device) for name, value in batch.items()}",
        *(f"    {line}" for line in _plain_micro_batch(workload, several)),
    ]
    head = "\n".join([*_plain_imports(optimizer_imports, several, workload), "", ""])
    text = f'{head}\ndef train(model, dataset, device="cuda"):\n' + "".join(f"    {line}\n" for line in body)
    remarks = [(remark, list[str]()) for remark in several.remarks]
    return text + _comments([*remarks, *_model(workload)])


def _plain_imports(optimizer: list[str], several: SpreadCode, workload: Workload) -> list[str]:
    """Return the imports of a loop, those of the standard library first."""
    standard = [line for line in several.imports if line == "import os"]
    if several.skips_sync and workload.train.gradient_accumulation_steps > 1:
        standard.insert(0, "import contextlib")
    rest = [line for line in several.imports if line not in standard]
    modules = [line for line in rest if line.startswith("import ")]
    names = sorted(["from torch.utils.data import DataLoader", *(line for line in rest if line not in modules)])
    names = [line for line in names if line != "from torch.utils.data import DistributedSampler"]
    if len(names) < len(rest) - len(modules) + 1:
        names = [f"{line}, DistributedSampler" if line.endswith(" DataLoader") else line for line in names]
    return [*standard, *[""] * bool(standard), "import torch", *modules, *names, *optimizer]


def _plain_batches(size: int, *, several: bool) -> str:
    """Return the loader of batches, of a part of the samples on each of several GPUs."""
    order = "sampler=DistributedSampler(dataset)" if several else "shuffle=True"
    return f"DataLoader(dataset, batch_size={size}, {order}, drop_last=True)"


def _plain_micro_batch(workload: Workload, several: SpreadCode) -> list[str]:
    """Return the lines from the forward pass to the end of the optimizer step."""
    train = workload.train
    accumulation = train.gradient_accumulation_steps
    dtype = "float16" if train.fp16 else "bfloat16" if train.bf16 else None
    mean = ".mean()" if several.devices > 1 else ""
    called = ["outputs = model(**batch)", f"loss = outputs.loss{mean}"]
    called = called if workload.keep_outputs else [f"loss = model(**batch).loss{mean}"]
    contexts = [f"torch.autocast(device, dtype=torch.{dtype})"] if dtype else []
    if workload.activation_offloading is not None:
        pinned = workload.activation_offloading == "pinned"
        contexts.append(f"torch.autograd.graph.save_on_cpu({'pin_memory=True' if pinned else ''})")
    forward = [f"with {', '.join(contexts)}:", *(f"    {line}" for line in called)] if contexts else called
    backward, step = _plain_update(workload, accumulation)
    passes = [*forward, backward, *(["del outputs"] if workload.keep_outputs else [])]
    if accumulation == 1:
        return [*passes, *step]
    test = f"number % {accumulation} == 0"
    if not several.skips_sync and not several.syncs:
        return [*passes, f"if {test}:", *(f"    {line}" for line in step)]
    if several.skips_sync:
        context = f"with contextlib.nullcontext() if last else {several.skips_sync}:"
        passes = [context, *(f"    {line}" for line in passes)]
    marks = [several.syncs] if several.syncs else []
    return [f"last = {test}", *marks, *passes, "if last:", *(f"    {line}" for line in step)]


def _plain_checkpointing(workload: Workload) -> list[str]:
    train = workload.train
    if not train.gradient_checkpointing:
        return []
    keywords = dict(train.gradient_checkpointing_kwargs or {})
    offload = ["offload=True"] if keywords.pop("offload", False) else []
    rest = [f"gradient_checkpointing_kwargs={_literal(keywords)}"] if keywords else []
    given = ", ".join([*rest, *offload])
    every = train.gradient_checkpointing_every
    lines = [f"model.gradient_checkpointing_enable({given})"]
    return [*lines, f"checkpoint_every(model, {every})"] if every > 1 else lines


def _plain_optimizer(workload: Workload, *, sharded: bool = False) -> tuple[list[str], list[str]]:
    """Return the imports and the lines that make the optimizer, as transformers' Trainer makes it.

    Args:
        workload: The training.
        sharded: Wrap it in ``ZeroRedundancyOptimizer``.
    """
    train = workload.train
    imports = ["from trainatomy.integrations import checkpoint_every"] if train.gradient_checkpointing_every > 1 else []
    extra, rate = _keywords(train.optimizer_arguments()), f"lr={train.learning_rate}"
    if is_class_path(train.optim):
        place, _, kind = train.optim.rpartition(".")
        return [f"from {place} import {kind}", *imports], _made(kind, [rate, *extra], sharded=sharded)
    if is_factory(train.optim):
        importing, making = _made_by_function(train.optim)
        return [importing, *imports], [making]
    if train.optim in ("adamw_torch", "adamw_torch_fused"):
        adam = {"betas": (train.adam_beta1, train.adam_beta2), "eps": train.adam_epsilon}
        given = [rate, *_keywords({**adam, "weight_decay": train.weight_decay})]
        fused = ["fused=True"] if train.optim == "adamw_torch_fused" else []
        return imports, _made("torch.optim.AdamW", [*given, *fused, *extra], sharded=sharded)
    names = ("optim", "optim_args", "optim_target_modules", "learning_rate", "weight_decay")
    values = {name: getattr(train, name) for name in (*names, "adam_beta1", "adam_beta2", "adam_epsilon")}
    given = _keywords({name: value for name, value in values.items() if value is not None})
    lines = [*_call("args = TrainingArguments", given, WIDTH - 4)]
    lines.append("kind, keywords = Trainer.get_optimizer_cls_and_kwargs(args, model)")
    if extra and train.optim in OF_TORCH:
        lines.append(f"keywords |= {_literal(train.optimizer_arguments())}")
    made = "ZeroRedundancyOptimizer" if sharded else "kind"
    parameters = 'keywords.pop("params", model.parameters())'
    lines.append(f"optimizer = {made}({parameters}, {'optimizer_class=kind, ' if sharded else ''}**keywords)")
    return ["from transformers import Trainer, TrainingArguments", *imports], lines


def _made_by_function(path: str) -> tuple[str, str]:
    """Return the import of a user's function and the line that calls it."""
    place, _, name = path.rpartition(":")
    module = PurePath(place).stem if place.endswith(".py") else place
    return f"from {module} import {name}", f"optimizer = {name}(model)  # step and zero each, if it returns several"


def _made(kind: str, keywords: list[str], *, sharded: bool) -> list[str]:
    if sharded:
        keywords = [f"optimizer_class={kind}", *keywords]
    name = "ZeroRedundancyOptimizer" if sharded else kind
    return _call(f"optimizer = {name}", ["model.parameters()", *keywords], WIDTH - 4)


def _plain_update(workload: Workload, accumulation: int) -> tuple[str, list[str]]:
    """Return the line of the backward pass, and the lines of the optimizer step."""
    train, zero = workload.train, workload.zero_grad_set_to_none
    loss = f"(loss / {accumulation})" if accumulation > 1 else "loss"
    clip = f"torch.nn.utils.clip_grad_norm_(model.parameters(), {train.max_grad_norm!r})"
    clips = [clip] if train.max_grad_norm > 0 else []
    if train.fp16:
        backward = f"scaler.scale({loss.strip('()') if accumulation > 1 else loss}).backward()"
        clips = ["scaler.unscale_(optimizer)", *clips] if clips else []
        step = [*clips, "scaler.step(optimizer)", "scaler.update()"]
    else:
        backward, step = f"{loss}.backward()", [*clips, "optimizer.step()"]
    return backward, [*step, f"optimizer.zero_grad({'' if zero else 'set_to_none=False'})"]
