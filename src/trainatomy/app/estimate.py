"""An estimate of memory while the exact prediction is executed."""

from __future__ import annotations

from dataclasses import replace

from trainatomy.app.answers import Request
from trainatomy.app.form import Form
from trainatomy.app.workers import Workers


def estimated_bytes(workers: Workers, form: Form) -> int | None:
    """Return device memory on the line through the two executed batch sizes nearest to that of a form.

    None where fewer than two training runs were executed that differ from the form in nothing but the batch size. The
    allocator rounds sizes and may choose other blocks, which the line leaves out: it is shown as an estimate only.
    """
    known = [
        (batch, found.device_bytes)
        for batch in range(1, 129)
        if batch != form.batch
        and (found := workers.known(Request.of("bill", replace(form, batch=batch).workload()))) is not None
        and found.device_bytes is not None
    ]
    if len(known) < 2:
        return None
    (low, low_bytes), (high, high_bytes) = sorted(known, key=lambda point: abs(point[0] - form.batch))[:2]
    return max(0, round(low_bytes + (high_bytes - low_bytes) * (form.batch - low) / (high - low)))
