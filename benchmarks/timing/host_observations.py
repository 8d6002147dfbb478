"""Say what was measured of the host and what it costs by today's figures, part by part: input of ``host_refit.py``.

An observation is a step that the CPU bounds (``records/trainings-*.jsonl.gz``, ``benchmarks/everyday/records``), a
phase of a small training, a first or a further token (``records/host-*.jsonl.gz``, ``pace-forms-h200.jsonl.gz``).  Its
parts are microseconds by the name of the cost in ``catalog/hosts.yaml``, and ``rest`` for what is not fitted.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "accuracy"), str(HERE.parent / "everyday")]

import everyday_cases  # noqa: E402
import grid  # noqa: E402
import training_errors  # noqa: E402
import trainings  # noqa: E402

from trainatomy.catalog.hosts import reference_host  # noqa: E402
from trainatomy.measurement.device.host_probe import PROBE  # noqa: E402
from trainatomy.results.host_pace import HostPace  # noqa: E402
from trainatomy.timing import launch  # noqa: E402
from trainatomy.timing.host_costs import cpu_costs, not_collating  # noqa: E402
from trainatomy.training.throughput import samples_per_step  # noqa: E402
from trainatomy.workload.loops import loop_of  # noqa: E402
from trainatomy.workload.schema import Workload  # noqa: E402

HOST = reference_host()
COSTS = HOST.microseconds
GPUS = ("h200", "h100-sxm")
SMALL = ("host-everyday-h200", "host-drawn-h200", "pace-forms-h200", "host-pairs-h200")
GAP = 12
"""Lines between two records of a GPU above which another visit of the machine began."""
FAMILIES = {f"host-families-{gpu}": gpu for gpu in GPUS}
"""Records of tiny trainings of ``trainings.yaml`` (``host_families.py``)."""
PHASES = {"micro_step_begin>forward_end": "forward", "forward_end>loss_kept": "backward"}
PHASES |= {"optimizer_begin>optimizer_end": "optimizer"}
MERGED = {"recompute": "backward", "zero_grad": "other"}
RECURRENT = "recurrent_launch"
"""Name of what cuDNN launches inside of recurrent networks, which grows less than the pace."""
KEPT = frozenset({"host", "list", "collective"})
"""Kinds whose costs are not fitted."""
FAR_FROM_THE_HOST = 0.7
"""Share of a measured step that the CPU's part must reach, so that the CPU bounds it."""
Parts = dict[str, defaultdict[str, float]]


def _parts_of(workload: Workload, operations: Any) -> Parts:
    loop = loop_of(workload).cpu_costs
    found = parts_of(operations, loop, collated=workload.data.factory is None)
    found["other"][f"sample.{loop}"] += COSTS["sample"][loop] * samples_per_step(workload)
    return found


def parts_of(operations: Any, loop: str, *, collated: bool = True) -> Parts:
    """Return the microseconds of today's costs in a step, by phase and by the name of the cost.

    ``collated``: the loop makes batches of samples.
    """
    found: Parts = defaultdict(lambda: defaultdict(float))
    graph = any(one.phase == "backward" for one in operations.operations)
    costs = cpu_costs(COSTS)
    if not collated:
        costs = not_collating(costs)
    within = launch.seconds_between_operations(operations, costs)
    for one, whole in zip(operations.operations, launch.launch_seconds(operations, costs, loop), strict=True):
        context, kind = launch.priced_launch(one, operations.calls[one.call], graph=graph)
        phase, times = MERGED.get(one.phase, one.phase), one.repeats * one.threads
        us = _launch_us(context, kind) * times
        name = f"{context}.{kind}"
        if one.phase == "recompute":
            us, name = us * COSTS["recomputed"], "recomputed"
        inside = 0.0
        if kind == "recurrent":
            inside = launch.seconds_within(operations.calls[one.call], costs) * 1e6 * times
            found[phase][RECURRENT] += inside
        found[phase]["rest" if kind in KEPT else name] += us
        found[phase]["rest"] += (whole - within.get(one.phase, 0.0) * one.threads) * 1e6 * one.repeats - us - inside
    micro_steps = launch.count_micro_steps(operations)
    for phase, calls in operations.module_calls.items():
        share, name = (COSTS["recomputed"], "recomputed") if phase == "recompute" else (1.0, "module_call")
        found[MERGED.get(phase, phase)][name] += calls * share * COSTS["module_call"]
    for called, calls in operations.python_calls.items():
        (name, _, phase), known = called.rpartition("."), COSTS["python_call"]
        each = known.get(called, known.get(name, known["other"]))
        found[MERGED.get(phase, phase)][f"python_call.{called}"] += calls * each
    regions = launch.checkpointed_regions(operations)
    for phase in ("forward", "backward") if graph else ():
        found[phase][f"{phase}_pass"] += micro_steps * COSTS[f"{phase}_pass"]
        found[phase][f"checkpoint.{phase}"] += regions * COSTS["checkpoint"][phase]
    if found["optimizer"]:
        found["optimizer"][f"optimizer_step.{loop}"] += COSTS["optimizer_step"][loop]
    for name, us in _loop_us(operations, loop, micro_steps).items():
        found["other"][name] += us
    if collated:
        found["other"][f"collate.{loop}"] += COSTS["collate"][loop]
    return found


def _launch_us(context: str, kind: str) -> float:
    if context != "ungraphed":
        return float(COSTS[context][kind])
    shares = COSTS["without_graph"]
    return float(COSTS["graph"][kind] * shares.get(kind, shares[launch.OTHER]))


def _loop_us(operations: Any, loop: str, micro_steps: int) -> dict[str, float]:
    modules = operations.modules or operations.module_calls.get("forward", 0) / micro_steps
    times = {"step": 1, "micro_step": micro_steps, "parameter_step": operations.parameters}
    times["module_micro_step"] = modules * micro_steps
    return {f"{name}.{loop}": COSTS[name][loop] * count for name, count in times.items()}


def whole(parts: Parts) -> Counter[str]:
    """Return the parts of all phases together."""
    found = Counter[str]()
    for of_phase in parts.values():
        found.update(of_phase)
    return found


def steps() -> Iterator[dict[str, Any]]:
    """Yield the measured steps of trainings that the CPU bounds."""
    found = [(gpu, *one) for gpu in GPUS for one in bound_steps(gpu)]
    parts = simulated({line["name"] for _, _, line, _ in found})
    for gpu, visit, line, pace in found:
        if (of_phases := parts.get(line["name"])) is not None:
            us = line["step_seconds"] * 1e6
            yield _observation(line["name"], line["name"], gpu, visit, "step", whole(of_phases), us, pace)


def bound_steps(gpu: str) -> Iterator[tuple[str, dict[str, Any], float]]:
    """Yield the visit of the machine, the record and the pace of steps that the CPU bounds."""
    predicted, visit, last = {one["name"]: one for one in trainings.lines(trainings.predictions_of(gpu))}, "", -GAP
    for place, line in enumerate(trainings.lines(trainings.records_of(gpu))):
        pace, ours = line.get("host_pace"), predicted.get(line["name"])
        if line.get("part") != "steps" or ours is None or not pace or pace["probe"] != PROBE:
            continue
        recorded = training_errors.todays(HostPace(**pace))
        factor = recorded.beside(recorded.reference_seconds or 1.0)
        if training_errors.bound_at(ours, factor) != "host":
            continue
        visit, last = (f"{gpu} {place}" if place - last > GAP else visit), place
        yield visit, line, factor


def simulated(names: set[str]) -> dict[str, Parts]:
    """Return what trainings cost; those of torchvision come last (torchvision_path.py says why)."""
    found, rows = dict[str, Parts](), [row for row in grid.rows(trainings.TRAININGS) if row.name in names]
    for row in sorted(rows, key=lambda row: "factory" in row.mapping["model"]):
        try:
            found[row.name] = simulated_step(row)[1]
        except Exception as error:
            print(f"{row.name}: left out: {error}", flush=True)
    return found


def simulated_step(row: grid.Row) -> tuple[Any, Parts]:
    """Return the operations of a training's step and what they cost."""
    workload = row.workload(HERE).model_copy(update={"gpu": "h200"})
    operations = _simulated(workload).operations
    return operations, _parts_of(workload, operations)


def _simulated(workload: Workload) -> Any:
    from trainatomy.simulator.simulate import simulate

    return simulate(workload, workload.resolve_gpu())


def everyday() -> Iterator[dict[str, Any]]:
    """Yield steps and tokens of everyday cases; where only some steps generate, none."""
    for gpu in GPUS:
        for line in everyday_cases.lines(everyday_cases.RECORDS / gpu):
            pace = everyday_cases.pace_of(line)
            if pace is None or line.get("shared") or line["status"] != "completed" or "lengths" in line["kind"]:
                continue
            workload = everyday_cases.Case(line["name"], line["kind"], line["workload"]).workload("h200")
            about = (line["name"], _family(line["workload"]), gpu, f"everyday {gpu} {line['date']}")
            if workload.loop == "grpo":
                continue
            simulation = _simulated(workload)
            parts = _parts_of(workload, simulation.operations)
            if (times := line.get("generation")) and simulation.generation is not None:
                for phase, part in tokens_of(simulation, parts):
                    if us := times.get(f"{phase.replace(' ', '_')}_seconds"):
                        yield _observation(*about, phase, part, us * 1e6, pace)
                continue
            yield _observation(*about, "step", whole(parts), line["step_seconds"] * 1e6, pace)


def tokens_of(simulation: Any, parts: Parts) -> Iterator[tuple[str, Counter[str]]]:
    """Yield what the first token and a further one cost."""
    prefill = simulation.generation.prefill(simulation.operations)
    further = max((one.repeats for one in simulation.operations.operations if one.generated), default=0)
    first = whole(parts_of(prefill, launch.GENERATION))
    yield "first token", first
    if further:
        rest = whole(parts)
        rest.subtract(first)
        yield "token", Counter({name: us / further for name, us in rest.items()} | {"token": COSTS["token"]})


def phases() -> Iterator[dict[str, Any]]:
    """Yield the measured phases of small trainings, and the tokens of small generations."""
    for source in SMALL:
        for line in trainings.lines(HERE / "records" / f"{source}.jsonl.gz"):
            mapping = line.get("mapping")
            if "us" not in line or not mapping or mapping.get("loop") == "grpo":
                continue
            workload = Workload.from_mapping({**mapping, "name": line["name"], "gpu": "h200"})
            simulation = _simulated(workload)
            parts = _parts_of(workload, simulation.operations)
            about = (line["name"], _family(mapping), "h200", source)
            if mapping.get("mode") == "generation":
                measured = _token_times(line)
                for phase, part in tokens_of(simulation, parts):
                    if us := measured.get(phase):
                        yield _observation(*about, phase, part, us, paces_of(line)[0])
                continue
            yield from _phases(about, line, parts)


def families() -> Iterator[dict[str, Any]]:
    """Yield the measured phases of tiny trainings of all families."""
    for source, gpu in FAMILIES.items():
        for line in trainings.lines(HERE / "records" / f"{source}.jsonl.gz"):
            row = grid.Row(line["name"], line["family"], line["mapping"], alone=False, held_out=False)
            yield from _phases((row.name, row.family, gpu, source), line, simulated_step(row)[1])


def _phases(about: tuple[str, str, str, str], line: Mapping[str, Any], parts: Parts) -> Iterator[dict[str, Any]]:
    times, (main, backward) = defaultdict[str, float](float), paces_of(line)
    for between, us in line["us"].items():
        times[PHASES.get(between, "other")] += us if isinstance(us, float | int) else _trimmed(us)
    for phase, us in times.items():
        if parts[phase] and us:
            pace = backward if phase == "backward" else main
            yield _observation(*about, phase, parts[phase], us, pace, us / sum(times.values()))


def _token_times(line: Mapping[str, Any]) -> dict[str, float]:
    found = defaultdict[str, list[float]](list)
    for events in line.get("tokens", ()):
        moments = {name: [at for one, at in events if one == name] for name in ("generation_begin", "token_begin")}
        (begun,), further, ended = moments["generation_begin"], moments["token_begin"], events[-1][1]
        if further:
            found["first token"].append(further[0] - begun)
            found["token"].append((ended - further[0]) / len(further))
    return {phase: median(times) for phase, times in found.items()}


def paces_of(line: Mapping[str, Any]) -> tuple[float, float]:
    """Return the paces of the main thread and of autograd's; the same where only their sum was recorded."""
    share, whole_us = HOST.backward_probe_shares[PROBE], HOST.probe_seconds[PROBE] * 1e6
    exponent = HOST.pace_exponents[PROBE]
    if (readings := line.get("readings")) is None:
        pace = float((_trimmed(line.get("step_probes_us", line["probe_us"])[-8:]) / whole_us) ** exponent)
        return pace, pace
    if isinstance(readings, Mapping):
        main, backward = readings["main_warm"], readings["visit_warm"]
    else:
        main, backward = ([one[part][0] for one in readings] for part in ("main", "visit"))
    paces = (_trimmed(main) / (whole_us * (1 - share)), _trimmed(backward) / (whole_us * share))
    return paces[0] ** exponent, paces[1] ** exponent


def _trimmed(values: Sequence[float]) -> float:
    ordered = sorted(values)
    left_out = max(1, len(ordered) // 5)
    return fmean(ordered[left_out:-left_out] or ordered)


def _family(mapping: Mapping[str, Any]) -> str:
    return str(mapping["model"].get("class", mapping["model"]))


def _observation(
    name: str,
    family: str,
    gpu: str,
    visit: str,
    phase: str,
    parts: Mapping[str, float],
    us: float,
    pace: float,
    share: float = 1.0,
) -> dict[str, Any]:
    powers = {RECURRENT: pace ** (HOST.recurrent_exponent - 1)}
    kept = {key: round(value * powers.get(key, 1.0), 1) for key, value in parts.items() if abs(value) >= 0.1}
    about = {"name": name, "family": family, "gpu": gpu, "visit": visit, "phase": phase, "share": round(share, 3)}
    return {**about, "us": round(us, 1), "pace": round(pace, 4), "parts": kept}


def is_bound(one: Mapping[str, Any]) -> bool:
    """Return whether the CPU bounds an observation, as far as today's costs say."""
    return bool(one["phase"] != "step" or sum(one["parts"].values()) * one["pace"] >= FAR_FROM_THE_HOST * one["us"])
