"""Training runs on several GPUs side by side: memory of the fullest GPU, throughput of all of them, and scaling."""

from __future__ import annotations

from rich.text import Text

from trainatomy.reporters.labels import VERDICT_STYLES
from trainatomy.reporters.settings import plan_name, strategy_name
from trainatomy.reporters.text.rendering import AdaptiveTable, Column
from trainatomy.results.comparison import Comparison
from trainatomy.results.plan import Plan, Scaling, fullest_rank
from trainatomy.units import human_bytes, percent, rate, seconds

EXPLANATION = (
    "Memory is that of the fullest GPU, samples/s those of all GPUs; scaling: throughput per GPU relative to the "
    "fastest of the same training runs on the fewest GPUs."
)


def scaling_table(comparison: Comparison) -> AdaptiveTable:
    """Return one row for each predicted training, with its plan, memory, total throughput and scaling."""
    rows = [
        (row, scaling) for row, scaling in zip(comparison.rows, comparison.scaling(), strict=True) if row.prediction
    ]
    accumulates = len({row.accumulation_steps for row, _ in rows}) > 1
    named = any(row.name not in _named_by_plan(row.plan) for row, _ in rows)
    several_cards = len({row.prediction.gpu.id for row, _ in rows if row.prediction}) > 1
    columns = [Column("\nGPUs"), Column("\nplan", justify="left")] if named else []
    columns += [Column("\nverdict", justify="left"), Column("device\nmemory")]
    columns += [Column("accum.\nsteps", 3)] if accumulates else []
    columns += [Column("time\nper step", 2), Column("samples/s\nin total"), Column("samples/s\nper GPU", 1)]
    columns += [Column("\nscaling")]
    columns += [Column("\nGPU", justify="left")] if several_cards else []
    table = AdaptiveTable("\ntraining" if named else "\nplan", columns, name_width=22)
    for row, scaling in rows:
        assert row.prediction is not None
        rank, time = fullest_rank(row.prediction), row.prediction.time
        cells: list[str | Text] = [_count(row.plan), strategy_name(row.plan)] if named else []
        cells += [Text(rank.verdict, style=VERDICT_STYLES[rank.verdict]), human_bytes(rank.memory.device_bytes)]
        cells += [str(row.accumulation_steps)] if accumulates else []
        cells += ["" if time is None else seconds(time.step_seconds), *_rates(scaling)]
        cells += [row.prediction.gpu.id] if several_cards else []
        table.add_row(row.name if named else plan_name(row.plan), *cells)
    return table


def _named_by_plan(plan: Plan) -> tuple[str, ...]:
    """Return the names of rows that say nothing but the plan, as sweeps give them."""
    strategy = f"strategy={plan.strategy}"
    return (f"gpus={plan.gpus}", strategy, f"gpus={plan.gpus}, {strategy}", f"{strategy}, gpus={plan.gpus}")


def _count(plan: Plan) -> str:
    return str(plan.gpus) if plan.nodes == 1 else f"{plan.nodes} × {plan.gpus}"


def _rates(scaling: Scaling | None) -> list[str]:
    """Return the throughput in total, per GPU, and its efficiency."""
    if scaling is None:
        return ["", "", ""]
    efficiency = "" if scaling.efficiency is None else percent(scaling.efficiency, 1, 0)
    return [rate(scaling.samples_per_second), rate(scaling.samples_per_second_per_gpu), efficiency]
