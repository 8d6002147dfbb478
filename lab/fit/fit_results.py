"""Compare the plan with what was measured: regret, verdicts, auto_find_batch_size, ratios of step times."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

import numpy
from fit_cases import GIB, Cases
from fit_tasks import NEAR, Plan

Line = Mapping[str, Any]
Key = tuple[str, int | None, str]
"""Case, limit in GiB, label."""
Grid = Mapping[tuple[str, str], Line]
"""Lines of points without a limit, by case and label."""


@dataclass(frozen=True, slots=True)
class Regret:
    """A case under a limit.

    Attributes:
        chosen: Label of the chosen settings; throughputs in samples/s are predicted and measured.  Settings that were
            measured again with the contenders count as they ran there, without a limit; others as they ran under it.
        from_grid: Whether the measured throughput is that of a contender.
        limited_measured: Throughput of the choice as it ran under the limit.
        run_at_gib: The smaller limit under which the same settings ran, if they were not run again under this one.
        best: The fastest measured point of the grid that fits the limit.
        best_again: Whether that point was measured in the session of the choices; the other points count as they ran in
            the first session.
        roomy: The fastest of those that also leave the headroom that the search leaves; ``roomy_again`` likewise.
        tied_measured: Throughput of the fastest of the choice and of those points of the grid, measured in the same
            session, that the search reported as ties with it: what measuring the ties would have chosen.
        foreseen: The point of the grid that is predicted to be the fastest of those that leave the headroom; compared
            within the first session, which measured the whole grid.
    """

    case: str
    limit_gib: int
    chosen: str
    predicted: float | None
    measured: float | None
    status: str
    run_at_gib: int | None
    best: str | None
    best_measured: float | None
    roomy: str | None
    roomy_measured: float | None
    foreseen: str | None
    foreseen_measured: float | None
    foreseen_best_measured: float | None
    limited_measured: float | None
    from_grid: bool
    best_again: bool
    roomy_again: bool
    tied_measured: float | None

    @property
    def share(self) -> float | None:
        """Measured throughput of the choice over that of the best point."""
        return _share(self.measured, self.best_measured)

    @property
    def roomy_share(self) -> float | None:
        """The same over the best point that leaves the headroom."""
        return _share(self.measured, self.roomy_measured)

    @property
    def tied_share(self) -> float | None:
        """Throughput of the choice after measuring its ties over that of the best point that leaves the headroom."""
        return _share(self.tied_measured, self.roomy_measured)

    @property
    def foreseen_share(self) -> float | None:
        """Measured throughput of the foreseen point over that of the best that leaves the headroom."""
        return _share(self.foreseen_measured, self.foreseen_best_measured)

    @property
    def limited_share(self) -> float | None:
        """Throughput of the choice under the limit over that of the best point that leaves the headroom."""
        return _share(self.limited_measured, self.roomy_measured)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Settings that ran under a limit: whether they were predicted to fit, and whether they did."""

    case: str
    limit_gib: int
    label: str
    predicted: bool
    measured: bool
    share_of_limit: float

    @property
    def is_right(self) -> bool:
        """Whether the prediction was right."""
        return self.predicted == self.measured


@dataclass(frozen=True, slots=True)
class Automatic:
    """A run of auto_find_batch_size, beside the choice for the same case and limit."""

    case: str
    limit_gib: int
    tried: tuple[int, ...]
    batch: int
    effective_batch: int
    seconds_to_answer: float | None
    samples_per_second: float | None
    fit_seconds: float | None
    fit_label: str
    fit_samples_per_second: float | None


@dataclass(frozen=True, slots=True)
class Ratio:
    """Predicted over measured ratio of two step times of a case; ``bound``: gpu, mixed or host."""

    case: str
    one: str
    other: str
    bound: str
    ratio: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """Everything that is reported of a plan.

    Attributes:
        calibrated: The plan's times are by a calibration of the machine that measured.
        clear_verdicts: Points and limits that are far enough from each other that no run under the limit is needed.
        unmeasured: Points of the grid without a measured time.
    """

    calibrated: bool
    regrets: tuple[Regret, ...]
    verdicts: tuple[Verdict, ...]
    automatic: tuple[Automatic, ...]
    ratios: tuple[Ratio, ...]
    points: int
    measured: int
    clear_verdicts: int
    clear_wrong: int
    unmeasured: tuple[str, ...]
    reserved_errors: tuple[float, ...]


def compare(plan: Plan, cases: Cases, lines: Sequence[Line], again: Sequence[Line] = ()) -> Comparison:
    """Return the comparison of a plan with measured lines.

    Args:
        plan: Predicted points and choices.
        cases: The trainings and their grids.
        lines: The session that measured the grids.
        again: The later session that measured the contenders among the points again, and the choices.
    """
    grid, contenders = (
        {(line["case"], line["label"]): line for line in some if line["kind"] == "grid"} for some in (lines, again)
    )
    limited = {
        (line["case"], line["limit_gib"], line["label"]): line
        for line in (*lines, *again)
        if line["kind"] in ("chosen", "verdict")
    }
    choices = {(choice["case"], choice["limit_gib"]): choice for choice in plan["choices"]}
    by_case = {case.name: [point for point in plan["points"] if point["case"] == case.name] for case in cases.cases}
    regrets = [
        _regret(by_case[case.name], gib, choices.get((case.name, gib)), grid, contenders, limited, plan["headroom"])
        for case in cases.cases
        for gib in cases.limits_gib
    ]
    clear = [
        (predicted["fits"], grid[point["case"], point["label"]]["device_bytes"] < int(gib) * GIB)
        for point in plan["points"]
        for gib, predicted in point["limits"].items()
        if (point["case"], point["label"]) in grid
        and (point["case"], int(gib), point["label"]) not in limited
        and grid[point["case"], point["label"]]["device_bytes"] is not None
        and abs(grid[point["case"], point["label"]]["device_bytes"] / (int(gib) * GIB) - 1) >= NEAR
    ]
    timed = [point for point in plan["points"] if _speed(point, grid) is not None]
    return Comparison(
        bool(plan.get("calibrated")),
        tuple(regrets),
        tuple(_verdicts(plan, limited)),
        tuple(_automatic(line, regrets, choices) for line in lines if line["kind"] == "automatic"),
        tuple(_ratios(timed, grid)),
        len(plan["points"]),
        len(timed),
        len(clear),
        sum(predicted != measured for predicted, measured in clear),
        tuple(f"{point['case']}: {point['label']}" for point in plan["points"] if point not in timed),
        tuple(
            point["peak_reserved_bytes"] / grid[point["case"], point["label"]]["peak_reserved_bytes"] - 1
            for point in timed
        ),
    )


def _regret(
    points: Sequence[Mapping[str, Any]],
    gib: int,
    choice: Mapping[str, Any] | None,
    first: Grid,
    contenders: Grid,
    limited: Mapping[Key, Line],
    headroom: float,
) -> Regret:
    grid = {**first, **contenders}
    fitting = [point for point in points if _speed(point, grid) is not None and _fits(point, gib, grid, limited)]
    roomy = [point for point in fitting if _device_bytes(point, grid) <= (1 - headroom) * gib * GIB]
    (best, best_measured), (best_roomy, roomy_measured) = (_fastest(some, grid) for some in (fitting, roomy))
    promising = [point for point in points if point["device_bytes"] <= (1 - headroom) * gib * GIB]
    foreseen = max(promising, key=lambda one: float(one["samples_per_second"]), default=None)
    line, at = _run_of(choice, gib, limited)
    key = None if choice is None else (choice["case"], choice["label"])
    same_session = contenders or first
    beside = None if key is None else same_session.get(key)
    timed = beside or line
    return Regret(
        points[0]["case"],
        gib,
        "not asked" if choice is None else choice["label"],
        None if choice is None else choice.get("samples_per_second"),
        None if timed is None else timed["samples_per_second"],
        "not run" if line is None else line["status"],
        None if at == gib else at,
        best,
        best_measured,
        best_roomy,
        roomy_measured,
        None if foreseen is None else foreseen["label"],
        None if foreseen is None else _speed(foreseen, first),
        _fastest(roomy, first)[1],
        None if line is None else line["samples_per_second"],
        beside is not None,
        best is None or (points[0]["case"], best) in same_session,
        best_roomy is None or (points[0]["case"], best_roomy) in same_session,
        _fastest_tie(choice, timed, roomy, same_session),
    )


def _fastest_tie(
    choice: Mapping[str, Any] | None, timed: Line | None, roomy: Sequence[Mapping[str, Any]], grid: Grid
) -> float | None:
    """Return the throughput of the fastest of a choice and those of its ties that are points of ``grid``."""
    if choice is None or timed is None or timed["samples_per_second"] is None:
        return None
    ties = (_speed(point, grid) for point in roomy if point["label"] in choice.get("ties", ()))
    return max([float(timed["samples_per_second"]), *(speed or 0.0 for speed in ties)])


def _fastest(points: Sequence[Mapping[str, Any]], grid: Grid) -> tuple[str | None, float | None]:
    """Return the label and the throughput of the fastest point."""
    found = max(points, key=lambda one: _speed(one, grid) or 0, default=None)
    return (None, None) if found is None else (found["label"], _speed(found, grid))


def _run_of(choice: Mapping[str, Any] | None, gib: int, limited: Mapping[Key, Line]) -> tuple[Line | None, int | None]:
    """Return the timed run of chosen settings under the limit, or else under the largest smaller one."""
    if choice is None:
        return None, None
    found = {
        at: line
        for (case, at, label), line in limited.items()
        if at is not None and (case, label) == (choice["case"], choice["label"]) and at <= gib and line["alone"]
    }
    at = max(found, default=None)
    return (None, None) if at is None else (found[at], at)


def _fits(point: Mapping[str, Any], gib: int, grid: Grid, limited: Mapping[Key, Line]) -> bool:
    """Return whether a point fits a limit: by its run under that limit, or else by its memory without one."""
    line = limited.get((point["case"], gib, point["label"]))
    if line is not None:
        return bool(line["status"] == "completed")
    return _device_bytes(point, grid) <= gib * GIB


def _device_bytes(point: Mapping[str, Any], grid: Grid) -> int:
    """Return the measured device memory of a point without a limit.

    Where NVML was not readable, it is the measured reserved memory and the predicted context.
    """
    line = grid[point["case"], point["label"]]
    context = point["device_bytes"] - point["peak_reserved_bytes"]
    return int(line.get("device_bytes") or line["peak_reserved_bytes"] + context)


def _speed(point: Mapping[str, Any], grid: Grid) -> float | None:
    """Return the measured samples/s of a point without a limit."""
    line = grid.get((point["case"], point["label"]))
    return None if line is None else line.get("samples_per_second")


def _verdicts(plan: Plan, limited: Mapping[Key, Line]) -> list[Verdict]:
    """Return every run under a limit with what was predicted for it."""
    points = {(point["case"], point["label"]): point for point in plan["points"]}
    chosen = {(choice["case"], choice["limit_gib"], choice["label"]): choice for choice in plan["choices"]}
    found = []
    for (case, gib, label), line in limited.items():
        assert gib is not None
        point, choice = points.get((case, label)), chosen.get((case, gib, label))
        entry = choice or point
        if entry is None:
            continue
        fits = choice["fits"] if choice is not None else entry["limits"][str(gib)]["fits"]
        share = entry["device_bytes"] / (gib * GIB)
        found.append(Verdict(case, gib, label, fits, line["status"] == "completed", share))
    return found


def _automatic(
    line: Line, regrets: Sequence[Regret], choices: Mapping[tuple[str, int], Mapping[str, Any]]
) -> Automatic:
    regret = next(one for one in regrets if (one.case, one.limit_gib) == (line["case"], line["limit_gib"]))
    choice = choices.get((regret.case, regret.limit_gib), {})
    return Automatic(
        regret.case,
        regret.limit_gib,
        tuple(line["tried"]),
        line["batch"],
        line["effective_batch"],
        line["seconds_to_answer"],
        line["samples_per_second"],
        choice.get("seconds_to_answer"),
        regret.chosen,
        regret.measured,
    )


def _ratios(points: Sequence[Mapping[str, Any]], grid: Grid) -> list[Ratio]:
    """Return the ratios of all pairs of measured points of the same case."""
    found = []
    for one, other in combinations(points, 2):
        if one["case"] != other["case"]:
            continue
        hosts = (one["bound_by"] == "host") + (other["bound_by"] == "host")
        measured = (_speed(other, grid) or 1) / (_speed(one, grid) or 1)
        predicted = other["samples_per_second"] / one["samples_per_second"]
        bound = ("gpu", "mixed", "host")[hosts]
        found.append(Ratio(one["case"], one["label"], other["label"], bound, predicted / measured))
    return found


def within(ratios: Sequence[Ratio], share: float = 0.9) -> float:
    """Return the factor that so large a share of the ratios is within, in both directions."""
    errors = [abs(math.log(ratio.ratio)) for ratio in ratios]
    return math.exp(float(numpy.quantile(errors, share, method="inverted_cdf")))


def _share(one: float | None, other: float | None) -> float | None:
    return None if one is None or not other else one / other


def to_plain(comparison: Comparison) -> dict[str, Any]:
    """Return the comparison as plain values; ratios as how many of each bound, and the factor for 9 of 10."""
    content = asdict(comparison)
    for entry, regret in zip(content["regrets"], comparison.regrets, strict=True):
        entry |= {
            "share": regret.share,
            "roomy_share": regret.roomy_share,
            "tied_share": regret.tied_share,
            "foreseen_share": regret.foreseen_share,
        }
    content["ratios"] = {
        bound: {"pairs": len(some), "nine_of_ten_within": within(some)}
        for bound in ("gpu", "mixed", "host")
        if (some := [ratio for ratio in comparison.ratios if ratio.bound == bound])
    }
    return content
