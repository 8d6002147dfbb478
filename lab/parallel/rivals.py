"""Ask other tools for the memory of the measured cases: ``python lab/parallel/rivals.py TOOL [TOOL ...]``.

Tools: ``deepspeed`` (its estimators for ZeRO-2 and ZeRO-3), ``llm-analysis`` (Llama by DDP, FSDP and ZeRO) and
``fsdp-mem-tracker`` (FSDP2; its fake tensors are on CUDA, which requires a GPU).  Answers are kept in
``records/rivals.json``; ``--report`` prints their errors against the measured peaks of allocated memory.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import parallel_cases

from trainatomy.training.model import build_model

if TYPE_CHECKING:
    from torch import nn

    from trainatomy.workload.schema import Workload

ANSWERS = Path(__file__).parent / "records" / "rivals.json"
STEPS = 2


class NoAnswer(Exception):
    """The tool has no answer for a case."""


def on_meta(workload: Workload) -> nn.Module:
    """Return the model without memory."""
    import torch

    with torch.device("meta"):
        return build_model(workload)


def deepspeed(workload: Workload) -> int:
    """Return what DeepSpeed's estimators say of a case of ZeRO-2 or ZeRO-3."""
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

    settings = workload.train.deepspeed
    zero = {} if settings is None else dict(settings).get("zero_optimization", {})
    model = on_meta(workload)
    total = sum(each.numel() for each in model.parameters())
    offload = "offload_optimizer" in zero
    gpus = workload.parallel.gpus
    if zero.get("stage") == 2:
        return int(estimate_zero2_model_states_mem_needs(total, gpus, cpu_offload=offload)[1])
    if zero.get("stage") == 3:
        layers = (sum(each.numel() for each in module.parameters(recurse=False)) for module in model.modules())
        return int(
            estimate_zero3_model_states_mem_needs(
                total, max(layers), gpus, cpu_offload=offload, cpu_offload_params="offload_param" in zero
            )[1]
        )
    raise NoAnswer("it estimates ZeRO-2 and ZeRO-3")


def llm_analysis(workload: Workload) -> int:
    """Return what llm-analysis says of a Llama with DDP, FSDP or ZeRO."""
    from llm_analysis.analysis import ActivationRecomputation, DSZeRO, LLMAnalysis
    from llm_analysis.config import ModelConfig, ParallelismConfig, get_dtype_config_by_name, get_gpu_config_by_name

    train, parallel = workload.train, workload.parallel
    if workload.model.lora is not None or workload.model.quantization is not None or workload.pauses:
        raise NoAnswer("asked about plain trainings only")
    built = on_meta(workload)
    if type(built).__name__ != "LlamaForCausalLM":
        raise NoAnswer("asked about Llamas only")
    config: Any = built.config
    if parallel.tp_size * parallel.cp_size * parallel.pp_size > 1 or train.deepspeed is not None:
        raise NoAnswer("asked about data parallelism only")
    sharded = train.fsdp or (parallel.strategy or "").startswith("fsdp")
    stage = 3 if sharded else 1 if parallel.strategy == "zero1" else 0
    model = ModelConfig(
        name="case", num_layers=config.num_hidden_layers, n_head=config.num_attention_heads,
        hidden_dim=config.hidden_size, vocab_size=config.vocab_size, max_seq_len=config.max_position_embeddings,
        num_key_value_heads=config.num_key_value_heads, ffn_embed_dim=config.intermediate_size, model_type="llama",
    )  # fmt: skip
    half = train.bf16 or parallel.mp_policy is not None or workload.model.dtype == "bfloat16"
    analysis = LLMAnalysis(
        model,
        get_gpu_config_by_name("h100-sxm-80gb"),
        get_dtype_config_by_name("w16a16e16" if half else "w32a32e32"),
        ParallelismConfig(dp_size=parallel.gpus),
    )
    found = analysis.training(
        batch_size_per_gpu=train.per_device_train_batch_size,
        gradient_accumulation_steps=train.gradient_accumulation_steps,
        seq_len=workload.data.sequence_length,
        activation_recomputation=ActivationRecomputation.FULL
        if train.gradient_checkpointing
        else ActivationRecomputation.NONE,
        ds_zero=DSZeRO(stage),
        mlp_gated_linear_units=True,
    )
    return int(found["(weight+op_state+grad+act)_memory_per_gpu"])


def fsdp_mem_tracker(workload: Workload) -> int:
    """Return the peak that PyTorch's FSDPMemTracker finds in two steps of a plain loop with FSDP2."""
    import torch
    import torch.distributed as dist
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from trainatomy.training.batch import build_batch

    parallel, train = workload.parallel, workload.train
    if parallel.strategy != "fsdp2" or workload.loop != "pytorch" or parallel.cp_size > 1 or parallel.offload_policy:
        raise NoAnswer("it follows FSDP2 in a plain loop")
    if not dist.is_initialized():
        dist.init_process_group("fake", rank=0, world_size=parallel.gpus, store=FakeStore())
    mesh = init_device_mesh("cuda", (parallel.gpus,))
    batch = build_batch(workload, on_meta(workload))
    given = {} if parallel.mp_policy is None else parallel.mp_policy.model_dump(exclude_none=True)
    policy = MixedPrecisionPolicy(**{name: getattr(torch, str(dtype)) for name, dtype in given.items()})
    with FakeTensorMode(allow_non_fake_inputs=True), torch.device("cuda"):
        model: Any = build_model(workload)
        if train.gradient_checkpointing:
            model.gradient_checkpointing_enable()
        inputs = {name: torch.empty(each.shape, dtype=each.dtype, device="cuda") for name, each in batch.items()}
        options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy}
        if parallel.reshard_after_forward is not None:
            options["reshard_after_forward"] = parallel.reshard_after_forward
        names = set(model._no_split_modules or ())
        for module in model.modules():
            if type(module).__name__ in names:
                fully_shard(module, **options)
        fully_shard(model, **options)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        tracker = FSDPMemTracker(model, optimizer)
        tracker.track_inputs((inputs,))
        with tracker:
            for step in range(STEPS):
                for _ in range(train.gradient_accumulation_steps):
                    with torch.autocast("cuda", torch.bfloat16, enabled=train.bf16):
                        loss = model(**inputs).loss
                    loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                if not step:
                    tracker.reset_mod_stats()
        snapshots = tracker.get_tracker_snapshot("peak")
    return int(max(each["Total"] for each in snapshots.values()))


TOOLS: dict[str, Callable[[Any], int]] = {
    "deepspeed": deepspeed,
    "llm-analysis": llm_analysis,
    "fsdp-mem-tracker": fsdp_mem_tracker,
}


def lines() -> Iterator[dict[str, Any]]:
    """Yield the measured cases that completed."""
    for text in parallel_cases.records().read_text(encoding="utf-8").splitlines():
        line = json.loads(text)
        if line["status"] == "completed":
            yield line


def ask(tools: list[str], out: Path) -> None:
    """Ask the tools about all cases, and keep what they answer."""
    known = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {}
    for tool in tools:
        answers: dict[str, Any] = {}
        for line in lines():
            try:
                answers[line["name"]] = TOOLS[tool](parallel_cases.Workload.from_mapping(line["workload"]))
            except NoAnswer:
                continue
            except Exception as error:
                answers[line["name"]] = (
                    f"{type(error).__name__}: {str(error).splitlines()[0][:160] if str(error) else ''}"
                )
            print(tool, line["name"], answers[line["name"]], flush=True)
        known[tool] = answers
    out.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")


def report(path: Path) -> None:
    """Print the errors of each tool."""
    measured = {line["name"]: line["peak_allocated_bytes"] for line in lines()}
    for tool, answers in json.loads(path.read_text(encoding="utf-8")).items():
        errors = {name: said / measured[name] - 1 for name, said in answers.items() if isinstance(said, int)}
        sizes = sorted(abs(error) for error in errors.values())
        if not sizes:
            print(f"{tool}: no answer to {len(answers)} cases")
            continue
        within = sum(size <= 0.01 for size in sizes)
        print(
            f"{tool}: {len(sizes)} of {len(answers)} cases answered, median {median(sizes):.1%}, "
            f"worst {sizes[-1]:.1%}, within 1 %: {within}"
        )
        for name, error in sorted(errors.items()):
            print(f"  {name:34} {error:+.1%}")


def main() -> int:
    """Ask or report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tools", nargs="*", choices=[*TOOLS, []])
    parser.add_argument("--out", type=Path, default=ANSWERS)
    parser.add_argument("--report", action="store_true")
    options = parser.parse_args()
    if options.tools:
        ask(options.tools, options.out)
    if options.report:
        report(options.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
