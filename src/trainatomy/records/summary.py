"""A record as a row of a history."""

from __future__ import annotations

from trainatomy.results.record import Record, Summary


def summary_of(record: Record, file: str = "") -> Summary:
    """``file``: where the record lies."""
    measured, prediction = record.measurement, record.prediction
    predicted = prediction.memory.device_bytes if prediction else None
    comparable = measured.status == "completed" and predicted is not None
    return Summary(
        id=record.id,
        file=file,
        created=record.created,
        name=measured.name,
        gpu=measured.gpu,
        status=measured.status,
        group=record.group,
        repeat=record.repeat,
        key=record.key,
        device_bytes=measured.device_bytes,
        predicted_device_bytes=predicted,
        gap=predicted / measured.device_bytes - 1 if comparable and predicted and measured.device_bytes else None,
        step_seconds=measured.step_seconds,
        samples_per_second=measured.samples_per_second,
    )
