"""What stands behind the bill: the modules that hold activations, bytes per parameter, and what it all rests on."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from trainatomy.reporters.sentences import fact_name, fact_source, fact_value, reasons
from trainatomy.reporters.text.bill import TITLES
from trainatomy.reporters.text.rendering import bullets
from trainatomy.results.memory import ModuleActivations
from trainatomy.results.prediction import BytesPerParameter, Fact, Prediction
from trainatomy.units import count_of, human_bytes, many, percent

TOP_MODULES = 10
_BASIS_STYLES = {"measured": "green", "computed": "", "assumed": "yellow"}


def modules_table(modules: Sequence[ModuleActivations], activations: int, top: int = TOP_MODULES) -> Table:
    """The modules that hold most activations at the peak; the rest in one line."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(overflow="fold")
    for _ in range(3):
        table.add_column(justify="right", no_wrap=True)
    ranked = sorted(modules, key=lambda share: -share.activation_bytes)
    for share in ranked[:top]:
        held = share.activation_bytes
        table.add_row(
            share.module or "(the model itself)", human_bytes(held), percent(held, activations), _tensors(share.tensors)
        )
    if rest := ranked[top:]:
        held = sum(share.activation_bytes for share in rest)
        tensors = _tensors(sum(share.tensors for share in rest))
        table.add_row(
            Text(many(len(rest), "other"), style="dim"), human_bytes(held), percent(held, activations), tensors
        )
    return table


def _tensors(count: int) -> Text:
    return Text(f"{count} tensor{'' if count == 1 else 's'}", style="dim")


def parameters_title(figures: BytesPerParameter) -> str:
    """``Bytes per parameter: 18.3, beside the guide's 18 (mixed precision with AdamW)``."""
    rule = f", beside the guide's {figures.rule:g} ({figures.rule_name})" if figures.rule is not None else ""
    return f"Bytes per parameter: {figures.actual:.2f}{rule}"


def parameters_body(prediction: Prediction) -> RenderableType:
    """How many parameters, what each of them costs by component, and why that is not the guide's rule."""
    figures = prediction.bytes_per_parameter
    trainable = figures.trainable_parameters
    share = percent(trainable, figures.parameters, 2)
    trained = "all trained" if trainable == figures.parameters else f"{count_of(trainable)} of them trained ({share})"
    parts = ", ".join(f"{TITLES.get(name, name)} {count:.2f}" for name, count in figures.parts.items() if count)
    held = [Text(f"{count_of(figures.parameters)} parameters, {trained}: {parts}")]
    return Group(*held, *([bullets(reasons(prediction))] if figures.reasons else []))


def facts_table(facts: Sequence[Fact]) -> Table:
    """Everything that was measured, computed or assumed, with its source."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(max_width=26)
    table.add_column(overflow="fold", max_width=30)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold", ratio=1)
    for fact in facts:
        table.add_row(
            fact_name(fact),
            fact_value(fact),
            Text(fact.basis, style=_BASIS_STYLES[fact.basis]),
            Text(fact_source(fact).removeprefix(f"{fact.basis}: "), style="dim"),
        )
    return table
