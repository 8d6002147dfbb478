"""A script on several GPUs, as a page."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from trainatomy.reporters.labels import SECTIONS
from trainatomy.reporters.script_sentences import script_sentences
from trainatomy.reporters.text.gpus import gpus_table
from trainatomy.reporters.text.rendering import bullets, section
from trainatomy.results.prediction import Prediction
from trainatomy.units import many


def scripts_page(predictions: Sequence[Prediction]) -> Group:
    """Return a script on several GPUs: verdict, headroom, step time and throughput."""
    fitting = sum(each.fits for each in predictions)
    answer = f"{predictions[0].name} as it is fits on {fitting} of {many(len(predictions), 'GPU')}."
    parts: list[RenderableType] = [Text(answer, style="bold"), Text(), gpus_table(predictions)]
    if (run := predictions[0].script) is not None:
        parts.append(section(SECTIONS["script"], bullets(script_sentences(run))))
    return Group(*parts)
