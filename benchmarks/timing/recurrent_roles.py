"""What each kernel of a recurrent network is for, and how many kernels run beside it (``recurrent_timelines.py``)."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate
from statistics import mean
from typing import Any, NamedTuple

AROUND = ("void at::native", "at::", "Memcpy", "void at_cuda", "void at::")
"""Beginnings of the names of kernels that are not cuDNN's."""


class Run(NamedTuple):
    """A run of a kernel, in microseconds: when the CPU launched it, when it began, and how long it took."""

    launched: float
    began: float
    took: float
    stream: int
    name: str


def roles_of(runs: Sequence[Run], *, backward: bool) -> dict[str, list[int]]:
    """Return the places of the runs by what they are for; fills and reductions are their products' ``helpers``."""
    roles = [_role(run.name) for run in runs]
    for places in _in_streams(runs, roles):
        for at, place in enumerate(places):
            if roles[place] != "gates":
                continue
            near = places[at + 1 : at + 4] if backward else places[max(at - 3, 0) : at][::-1]
            product = next((each for each in near if roles[each] in ("gates", "product")), None)
            if product is not None and roles[product] == "product":
                roles[product] = "step"
    found = defaultdict(list)
    for place, (run, role) in enumerate(zip(runs, roles, strict=True)):
        name = run.name.split(" ")[0]
        if role == "product":
            is_of_weights = "_nt_" in run.name.split(">")[0] or name.endswith(("NTT", "NTN"))
            role = "weights" if is_of_weights else "inputs"
        found[role].append(place)
    return found


def _role(name: str) -> str:
    if name.startswith(AROUND):
        return "around"
    known = {"elemWiseRNNcell": "gates", "_bp1": "gates", "_bp2": "biases", "dropout": "dropout"}
    known |= {"emset": "fill", "splitKreduce": "reduce"}
    return next((role for part, role in known.items() if part in name), "product")


def _in_streams(runs: Sequence[Run], roles: Sequence[str]) -> list[list[int]]:
    """Return the places of cuDNN's runs stream by stream, in the order in which they began."""
    streams = defaultdict(list)
    for place in sorted(range(len(runs)), key=lambda place: runs[place].began):
        if roles[place] != "around":
            streams[runs[place].stream].append(place)
    return list(streams.values())


def _with_helpers(runs: Sequence[Run]) -> list[float]:
    """Return the time of each run with that of the fill before it and the reduction after it."""
    roles = [_role(run.name) for run in runs]
    took = [run.took for run in runs]
    for places in _in_streams(runs, roles):
        for at, place in enumerate(places):
            beside = {"fill": at + 1, "reduce": at - 1}.get(roles[place], -1)
            if 0 <= beside < len(places) and roles[places[beside]] == "product":
                took[places[beside]] += runs[place].took
    return took


def kernels_beside(runs: Sequence[Run]) -> list[float]:
    """Return how many of cuDNN's kernels run on average while each of them does, itself included."""
    own = [run for run in runs if _role(run.name) != "around"]
    changes = sorted([(run.began, 1) for run in own] + [(run.began + run.took, -1) for run in own])
    times, numbers = [moment for moment, _ in changes], list(accumulate(change for _, change in changes))
    steps = zip(times, times[1:], numbers, strict=False)
    areas = [0.0, *accumulate((after - before) * number for before, after, number in steps)]

    def until(moment: float) -> float:
        at = bisect_right(times, moment) - 1
        return areas[at] + (moment - times[at]) * numbers[at] if at >= 0 else 0.0

    return [(until(run.began + run.took) - until(run.began)) / max(run.took, 1e-3) for run in runs]


def summary(runs: Sequence[Run], *, backward: bool) -> dict[str, Any]:
    """Return for each role of a pass how many kernels, their mean time and the kernels beside them, layer by layer."""
    roles, took, beside = roles_of(runs, backward=backward), _with_helpers(runs), kernels_beside(runs)

    def line(places: Sequence[int]) -> list[float]:
        numbers = mean(took[place] for place in places), mean(beside[place] for place in places)
        return [len(places), round(numbers[0], 2), round(numbers[1], 3)]

    def by_stream(places: Sequence[int]) -> list[list[int]]:
        streams = sorted({runs[place].stream for place in places})
        return [[place for place in places if runs[place].stream == stream] for stream in streams]

    found: dict[str, Any] = {}
    for role in ("step", "gates", "biases", "dropout"):
        if roles[role]:
            found[role] = [line(roles[role])]
    of_inputs = {runs[place].stream for place in roles["inputs"]}
    found["inputs"] = [line(places) for places in by_stream(roles["inputs"])]
    apart = [[place for place in roles["weights"] if (runs[place].stream in of_inputs) is own] for own in (True, False)]
    found["weights of inputs"], found["weights of states"] = (
        [line(places) for places in by_stream(each)] for each in apart
    )
    launched = sorted(runs[place].launched for place in roles["gates"])
    if len(launched) > 1:
        found["step_launch_us"] = round((launched[-1] - launched[0]) / (len(launched) - 1), 2)
    own = [run.took for run in runs if _role(run.name) != "around"]
    return {**found, "kernels": len(own), "us": round(sum(own), 1)}
