"""The time of a mean step, where steps of two kinds take turns: one in so many generates, the others do not."""

from __future__ import annotations

from dataclasses import replace

from trainatomy.results.time import PacedStep, Time


def mean_over_period(rare: Time, other: Time, period: int) -> Time:
    """Return the time of the mean step of ``period`` steps, of which one is ``rare`` and the rest are like ``other``.

    What is in seconds and what is counted is a mean; rates follow from it.  The rest is that of the kind that takes
    most of the time.
    """
    share = 1 / period

    def mean(one: float, another: float) -> float:
        return share * one + (1 - share) * another

    def of_time(one: float | None, another: float | None) -> float | None:
        if one is None or another is None:
            return None
        return mean(one * rare.step_seconds, another * other.step_seconds) / seconds

    seconds, flop = mean(rare.step_seconds, other.step_seconds), mean(rare.flop, other.flop)
    rate = rare.step_seconds / seconds
    longest = rare if rare.step_seconds > (period - 1) * other.step_seconds else other
    return replace(
        longest,
        step_seconds=seconds,
        interval_seconds=(
            mean(rare.interval_seconds[0], other.interval_seconds[0]),
            mean(rare.interval_seconds[1], other.interval_seconds[1]),
        ),
        samples_per_second=rare.samples_per_second * rate,
        tokens_per_second=None if rare.tokens_per_second is None else rare.tokens_per_second * rate,
        gpu_seconds=mean(rare.gpu_seconds, other.gpu_seconds),
        host_seconds=mean(rare.host_seconds, other.host_seconds),
        phases={
            phase: mean(rare.phases.get(phase, 0.0), other.phases.get(phase, 0.0))
            for phase in {**rare.phases, **other.phases}
        },
        flop=round(flop),
        flop_per_second=flop / seconds,
        model_flop_utilisation=of_time(rare.model_flop_utilisation, other.model_flop_utilisation),
        attainable_utilisation=of_time(rare.attainable_utilisation, other.attainable_utilisation),
        launches=round(mean(rare.launches, other.launches)),
        general_rule_only=tuple(sorted({*rare.general_rule_only, *other.general_rule_only})),
        power=None,  # it differs between the two kinds
        at_paces=tuple(
            PacedStep(one.pace, mean(one.step_seconds, another.step_seconds))
            for one, another in zip(rare.at_paces, other.at_paces, strict=True)
        ),
        slow_host=rare.slow_host
        and other.slow_host
        and replace(rare.slow_host, step_seconds=mean(rare.slow_host.step_seconds, other.slow_host.step_seconds)),
    )
