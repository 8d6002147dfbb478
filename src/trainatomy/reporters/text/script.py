"""A script on several GPUs, as a page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from trainatomy.reporters.labels import SECTIONS
from trainatomy.reporters.script_sentences import script_sentences
from trainatomy.reporters.text.gpus import gpus_table
from trainatomy.reporters.text.prediction import verdict_cell
from trainatomy.reporters.text.rendering import AdaptiveTable, Column, bullets, section
from trainatomy.results.prediction import Prediction
from trainatomy.results.script_fit import ScriptFit
from trainatomy.units import human_bytes, many, rate, seconds


def script_fit_page(found: ScriptFit) -> Group:
    """Return the candidates of a search over a script's flags, and the best one's command."""
    best = found.best
    names = list(dict.fromkeys(name for each in found.candidates for name in each.flags))
    columns = [*(Column(name) for name in names), Column("verdict", justify="left"), Column("needs")]
    table = AdaptiveTable("", [*columns, Column("time\nper step"), Column("samples\nper s")], name_width=6)
    for each in found.candidates:
        flags = [each.flags.get(name, "") for name in names]
        mark = "best" if each is best else ""
        if each.failed or each.prediction is None:
            table.add_row(mark, *flags, "failed", "-", "-", "-")
            continue
        needed, time = human_bytes(each.prediction.memory.device_bytes), each.prediction.time
        step = seconds(time.step_seconds) if time and each.fits else "-"
        pace = rate(time.samples_per_second) if time and each.fits else "-"
        table.add_row(mark, *flags, verdict_cell(each.prediction), needed, step, pace)
    parts: list[RenderableType] = [Text(f"{found.name} on {found.gpu}. {_answer(found)}", style="bold"), Text(), table]
    if said := list(_messages(found)):
        parts += [Text(), bullets(said)]
    return Group(*parts)


def _answer(found: ScriptFit) -> str:
    """Return which command is the fastest that fits, or why there is none."""
    failed, others = len(found.failed), len(found.candidates) - len(found.failed)
    if found.best is not None:
        return f"Fastest that fits: {' '.join(found.best.command)}"
    if not others:
        return f"The script failed with {'all' if failed > 1 else 'the'} values of its flags: {found.failed[0].message}"
    return f"Nothing fits of {many(others, 'run')}; {many(failed, 'other')} failed." if failed else "Nothing fits."


def _messages(found: ScriptFit) -> Iterator[str]:
    """Yield each message with the flags of the runs that it ended; all of them need not be named."""
    flags: dict[str, list[str]] = {}
    for each in found.candidates:
        if each.message:
            flags.setdefault(each.message, []).append(" ".join(f"{name} {value}" for name, value in each.flags.items()))
    for message, ended in flags.items():
        is_named = len(ended) < len(found.candidates)
        yield f"{'; '.join(ended)}: {message}" if is_named else message


def scripts_page(predictions: Sequence[Prediction]) -> Group:
    """Return a script on several GPUs: verdict, headroom, step time and throughput."""
    fitting = sum(each.fits for each in predictions)
    answer = f"{predictions[0].name} as it is fits on {fitting} of {many(len(predictions), 'GPU')}."
    parts: list[RenderableType] = [Text(answer, style="bold"), Text(), gpus_table(predictions)]
    if (run := predictions[0].script) is not None:
        parts.append(section(SECTIONS["script"], bullets(script_sentences(run))))
    return Group(*parts)
