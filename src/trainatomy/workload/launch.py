"""Settings that a launcher makes: accelerate's configuration, or a command of torchrun, accelerate or deepspeed.

Only what changes memory or time is read, into the keys of a workload: the number of GPUs and machines, mixed
precision, FSDP, DeepSpeed and the degrees of parallelism.  Of the script's own arguments, only ``--deepspeed`` is.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path as FilePath
from typing import Any

from trainatomy.errors import WorkloadError
from trainatomy.workload import launch_accelerate
from trainatomy.workload.document import parse
from trainatomy.workload.launch_accelerate import Launch, count, launch_of
from trainatomy.workload.shell import commands_in


def read_launch(text: str) -> Launch:
    """Read an accelerate configuration file, a file with a launch command, or a launch command.

    Raises:
        WorkloadError: It cannot be read, it contradicts itself, or it launches what is not simulated.
    """
    path = FilePath(text)
    command = None if path.is_file() else _command_in(text)
    if command is not None:
        return _of_command(command)
    if path.suffix in (".yaml", ".yml", ".json") or (path.is_file() and not _command_in(_text(path))):
        return launch_of(parse(_text(path), str(path)).value, str(path))
    command = _command_in(_text(path)) if path.is_file() else None
    if command is None:
        raise WorkloadError(
            f"--launch: {text!r} is neither a file nor a command of torchrun, deepspeed or accelerate launch",
            key="launch",
        )
    return _of_command(command)


def _text(path: FilePath) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise WorkloadError(f"--launch: cannot read {path}: {error}", key="launch") from error


def _command_in(text: str) -> list[str] | None:
    """Return the words of the first launch command in a text, from the launcher on; None if there is none."""
    for words, _ in commands_in(text):
        for index, word in enumerate(words):
            if FilePath(word).name == "torchrun" or word == "torch.distributed.run":
                return ["torchrun", *words[index + 1 :]]
            if FilePath(word).name == "deepspeed" and not words[:index]:
                return ["deepspeed", *words[index + 1 :]]
            if FilePath(word).name == "accelerate" and words[index + 1 : index + 2] == ["launch"]:
                return ["accelerate", *words[index + 2 :]]
    return None


# -- commands ----------------------------------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    """Parser of a launcher's own options; hyphens and underscores are the same."""

    def error(self, message: str) -> Any:
        raise WorkloadError(f"--launch: {message}", key="launch")


def _of_command(words: Sequence[str]) -> Launch:
    launcher, rest = words[0], [_with_hyphens(word) for word in words[1:]]
    return {"torchrun": _of_torchrun, "deepspeed": _of_deepspeed, "accelerate": _of_accelerate}[launcher](rest)


def _with_hyphens(word: str) -> str:
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if name.startswith("--") else word


def _of_torchrun(words: Sequence[str]) -> Launch:
    parser = _Parser("torchrun", add_help=False, allow_abbrev=False)
    parser.add_argument("--nproc-per-node", default="1")
    parser.add_argument("--nnodes", default="1")
    own = _before_script(words, _TORCHRUN_SWITCHES)
    known, _ = parser.parse_known_args(own)
    nodes = str(known.nnodes).partition(":")[2] or str(known.nnodes)  # MIN:MAX
    deepspeed = launch_accelerate.in_arguments(words[len(own) :], "torchrun")
    gpus = count(known.nproc_per_node, "--nproc-per-node")
    return Launch("torchrun", gpus, count(nodes, "--nnodes"), deepspeed=deepspeed)


def _of_deepspeed(words: Sequence[str]) -> Launch:
    """Read the command ``deepspeed``; a script that it starts names its configuration itself."""
    parser = _Parser("deepspeed", add_help=False, allow_abbrev=False)
    for option in ("--num-gpus", "--num-nodes", "--include", "-i"):
        parser.add_argument(option)
    own = _before_script(words, launch_accelerate.SWITCHES)
    known, _ = parser.parse_known_args(own)
    included = launch_accelerate.gpus_in(known.include or known.i or "")
    if len(set(included)) > 1:
        raise WorkloadError("--launch: deepspeed --include: machines with different numbers of GPUs", key="launch")
    gpus = count(known.num_gpus or next(iter(included), "all"), "deepspeed --num_gpus")
    nodes = count(known.num_nodes or max(len(included), 1), "--num_nodes")
    deepspeed = launch_accelerate.in_arguments(words[len(own) :], "deepspeed")
    return Launch("deepspeed", gpus, nodes, deepspeed=deepspeed)


_TORCHRUN_SWITCHES = frozenset({"--standalone", "--no-python", "--run-path", "--virtual-local-rank", "-m", "--module"})
_DISTRIBUTED_TYPES = {
    "use_fsdp": "FSDP",
    "use_deepspeed": "DEEPSPEED",
    "use_megatron_lm": "MEGATRON_LM",
    "tpu": "XLA",
    "multi_gpu": "MULTI_GPU",
}
"""Switches of ``accelerate launch``, and what a configuration file says instead."""
_ACCELERATE_SWITCHES = frozenset(
    {f"--{name.replace('_', '-')}" for name in _DISTRIBUTED_TYPES}
    | {"--cpu", "--debug", "-m", "--module", "--no-python", "-q", "--quiet", "--same-network", "--enable-cpu-affinity"}
    | {"--dynamo-use-fullgraph", "--dynamo-use-dynamic", "--dynamo-use-regional-compilation", "--downcast-bf16"}
    | {"--use-parallelism-config", "--fp8-use-autocast-during-eval"}
)


def _before_script(words: Sequence[str], switches: frozenset[str]) -> list[str]:
    """Return a launcher's own words: everything before the script, whose arguments may have the same names."""
    own: list[str] = []
    waiting = iter(words)
    for word in waiting:
        if not word.startswith("-"):
            break
        own.append(word)
        if "=" not in word and word not in switches:
            own += [value for value in [next(waiting, None)] if value is not None]
    return own


def _of_accelerate(words: Sequence[str]) -> Launch:
    """Read ``accelerate launch``: its options are the keys of a configuration file, which they override."""
    own = _before_script(words, _ACCELERATE_SWITCHES)
    options: dict[str, Any] = {}
    index = 0
    while index < len(own):
        name, equals, value = own[index].partition("=")
        index += 1
        if not equals and name not in _ACCELERATE_SWITCHES:
            value = own[index] if index < len(own) else ""
            index += 1
        options[name.removeprefix("--").replace("-", "_")] = value if equals or value else True
    file = options.pop("config_file", None)
    content = dict(parse(_text(FilePath(file)), file).value) if file else {}
    deepspeed = {name: options[name] for name in options if name in launch_accelerate.OPTIONS}
    if deepspeed:
        content["deepspeed_config"] = {**(content.get("deepspeed_config") or {}), **deepspeed}
    for section in ("fsdp", "parallelism_config", "dynamo"):
        given = {name: value for name, value in options.items() if name.startswith(f"{section}_")}
        if given:
            key = section if section.endswith("_config") else f"{section}_config"
            content[key] = {**(content.get(key) or {}), **given}
            options["use_fsdp"] = options.get("use_fsdp") or section == "fsdp"
    named = [kind for switch, kind in _DISTRIBUTED_TYPES.items() if options.get(switch)]
    if named and (named[0] != "MULTI_GPU" or "distributed_type" not in content):
        content["distributed_type"] = named[0]
    names = ("num_processes", "num_machines", "mixed_precision", "gpu_ids")
    content |= {name: options[name] for name in names if name in options}
    content["use_cpu"] = options.get("cpu") or content.get("use_cpu")
    if file is None and str(content.get("num_processes", 1)) != "1":
        content.setdefault("distributed_type", "MULTI_GPU")  # as accelerate does on a machine with several GPUs
    return launch_of(content, "accelerate launch")
