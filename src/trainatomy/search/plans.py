"""The axis of plans: how a training is spread over the GPUs that it has, without changing what is trained.

Something that a search varies, and what it can be.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from trainatomy.results.fit import Change, Permission
from trainatomy.results.prediction import DEFAULT_FSDP_VERSION, fsdp_version
from trainatomy.workload.parallel import ParallelSpec
from trainatomy.workload.schema import Workload
from trainatomy.workload.support import belongs_to


@dataclass(frozen=True, slots=True)
class Option:
    """A value of an axis: its name, and the keys of the workload that it sets."""

    name: str
    settings: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Axis:
    """Something that can be varied.

    Attributes:
        name: Name in results.
        options: What it can be; names are unique.
        given: Name of the option that the workload has.
        permission: What the user has to allow before the search varies it; empty if the same is trained either way.
        leanest: Name of the option that should take the least memory; empty for the given one.
    """

    name: str
    options: tuple[Option, ...]
    given: str
    permission: Permission = ""
    leanest: str = ""

    def option(self, name: str) -> Option:
        """Return the option of that name."""
        return next(option for option in self.options if option.name == name)

    def change(self, name: str) -> Change:
        """Return the change from the workload as given to an option."""
        return Change(self.name, name, self.option(name).settings, self.permission)


def axis_of(name: str, options: list[Option], given: str, permission: Permission = "", *, leanest: str = "") -> Axis:
    """Return an axis whose option ``given`` changes nothing; it is added if it is not among ``options``.

    ``leanest`` counts only if it is an option.
    """
    named = {option.name: option for option in options} | {given: Option(given)}
    return Axis(name, tuple(named.values()), given, permission, leanest if leanest in named else "")


NAME = "plan"


def plan_axis(workload: Workload) -> Axis:
    """Return the axis of plans; it has one option on one GPU, and where all GPUs share each layer."""
    parallel = workload.parallel
    if parallel.data_parallel_size == 1:
        return Axis(NAME, (Option("given"),), "given")
    by_loop = _plain(workload) if workload.loop == "pytorch" else _of_trainer(workload)
    return axis_of(NAME, list(by_loop), plan_of(workload), leanest="fsdp2")


def plan_of(workload: Workload) -> str:
    """Return the name of the option that describes a workload's plan."""
    parallel = workload.parallel
    if workload.loop != "pytorch":
        return _plan_of_trainer(workload)
    strategy = parallel.strategy or "ddp"
    if not strategy.startswith("fsdp"):
        return f"{strategy}_bucket_view" if parallel.gradient_as_bucket_view else strategy
    return _sharded_name(strategy, parallel.reshard_after_forward, parallel.replicas)


def on_one_gpu(workload: Workload) -> dict[str, object]:
    """Return the settings that make a training on several GPUs one on a single GPU."""
    settings: dict[str, object] = {"parallel.gpus": 1, "parallel.nodes": 1}
    if workload.loop != "pytorch":
        return settings | _unsharded(workload) | without_groups(workload)
    return settings | {"parallel.strategy": None} | _reset(workload.parallel, "ddp") | without_groups(workload)


def without_groups(workload: Workload) -> dict[str, object]:
    """Return the settings that leave the sizes of groups of ranks to the number of GPUs."""
    names = ("dp_replicate_size", "dp_shard_size")
    return {f"parallel.{name}": None for name in names if getattr(workload.parallel, name) is not None}


def fully_sharded(workload: Workload) -> dict[str, object]:
    """Return the settings of FSDP2 over all GPUs."""
    if workload.loop != "pytorch":
        return _by_trainer(workload, keeps=False) | without_groups(workload)
    return _sharded(workload.parallel, keeps=False) | without_groups(workload)


def _plain(workload: Workload) -> Iterator[Option]:
    """Yield the plans of ``loop: pytorch``; those of DDP only where it computes what the workload's plan does."""
    parallel = workload.parallel
    ungrouped = without_groups(workload)
    if parallel.tp_size == 1 and parallel.mp_policy is None:
        for name in ("ddp",) if workload.data.varies else ("ddp", "zero1"):  # see workload/support.yaml
            settings = {"parallel.strategy": name, **_reset(parallel, name), **ungrouped}
            yield Option(name, {**settings, "parallel.gradient_as_bucket_view": False})
            yield Option(f"{name}_bucket_view", {**settings, "parallel.gradient_as_bucket_view": True})
    for keeps in (False, True):
        settings = _sharded(parallel, keeps=keeps)
        yield Option("fsdp2_keep" if keeps else "fsdp2", {**settings, **ungrouped})
        if parallel.nodes > 1 and parallel.tp_size == 1:
            groups = {"parallel.dp_replicate_size": parallel.nodes, "parallel.dp_shard_size": parallel.gpus}
            name = _sharded_name("fsdp2", False if keeps else None, parallel.nodes)
            yield Option(name, {**settings, **groups})


def _sharded(parallel: ParallelSpec, *, keeps: bool) -> dict[str, object]:
    reset = {"parallel.strategy": "fsdp2", **_reset(parallel, "fsdp2")}
    return {**reset, "parallel.reshard_after_forward": False if keeps else None}


def _reset(parallel: ParallelSpec, strategy: str) -> dict[str, object]:
    """Return the defaults of those options of another strategy that are set."""
    defaults = {name: field.default for name, field in ParallelSpec.model_fields.items()}
    foreign = [name for name in defaults if not belongs_to(name, strategy)]
    return {f"parallel.{name}": defaults[name] for name in foreign if getattr(parallel, name) != defaults[name]}


def _sharded_name(strategy: str, reshard: bool | int | str | None, replicas: int) -> str:
    """Return ``fsdp2``, ``fsdp2_keep`` (gathered weights are kept until backward), ``hsdp_2`` (2 replicas)."""
    name = f"hsdp_{replicas}" if replicas > 1 else strategy
    if reshard is None:
        return name
    return f"{name}_keep" if reshard is False else f"{name}_reshard" + (f"_{reshard}" if reshard is not True else "")


def _of_trainer(workload: Workload) -> Iterator[Option]:
    """Yield the plans of the Trainer."""
    parallel, ungrouped = workload.parallel, without_groups(workload)
    yield Option("ddp", {**_unsharded(workload), **ungrouped})
    for keeps in (False, True):
        settings = _by_trainer(workload, keeps=keeps)
        yield Option("fsdp2_keep" if keeps else "fsdp2", {**settings, **ungrouped})
        if parallel.nodes > 1:
            groups = {"parallel.dp_replicate_size": parallel.nodes, "parallel.dp_shard_size": None}
            yield Option(_sharded_name("fsdp2", False if keeps else None, parallel.nodes), {**settings, **groups})


def _unsharded(workload: Workload) -> dict[str, object]:
    replicated: dict[str, object] = {"parallel.strategy": None} if workload.parallel.strategy == "dp" else {}
    return replicated | ({"train.fsdp": None, "train.fsdp_config": None} if workload.train.fsdp else {})


def _by_trainer(workload: Workload, *, keeps: bool) -> dict[str, object]:
    """Return the Trainer's settings of FSDP2, with what else the workload says of it."""
    train = workload.train
    given: Mapping[str, Any] = (train.fsdp_config or {}) if _version(workload) == 2 else {}
    rest = {name: value for name, value in given.items() if name not in ("version", "reshard_after_forward")}
    config = {**rest, "version": 2, "reshard_after_forward": not keeps}
    replicated: dict[str, object] = {"parallel.strategy": None} if workload.parallel.strategy == "dp" else {}
    return replicated | {"train.fsdp": True, "train.fsdp_config": config}


def _version(workload: Workload) -> int:
    return fsdp_version(workload.train.fsdp_config) if workload.train.fsdp else DEFAULT_FSDP_VERSION


def _plan_of_trainer(workload: Workload) -> str:
    train = workload.train
    if not train.fsdp:
        return workload.parallel.strategy or "ddp"
    reshard = (train.fsdp_config or {}).get("reshard_after_forward", True)
    keeps = reshard is False or str(reshard).lower() in ("false", "shard_grad_op")
    return _sharded_name(f"fsdp{_version(workload)}", False if keeps else None, workload.parallel.replicas)
