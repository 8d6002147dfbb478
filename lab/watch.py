"""Measure the overhead of watching a training: ``python lab/watch.py [--rounds 60] [--steps 6] [--ways watch]``.

Needs a GPU.  Watched and unwatched stretches of steps take turns in one process, in an order that changes from round to
round.  They are short, so that variations of the CPU's speed affect both stretches of a round; other work on the
machine only ever slows a step, so a quiet step of each stretch counts, and the overhead is the median over rounds.  Its
95 % interval comes from resampling rounds.  A watch records the modules of its first two steps, which cost more and are
reported separately.

By default the training is CPU-bound, so that the whole overhead shows.  ``--batch 32 --length 512`` makes it GPU-bound,
as most trainings are.

On a busy machine no number of rounds may suffice.  So ``parts`` adds up the work of a watch in a step: its notes, and
PyTorch's record of each allocation and release, each timed alone and many times.

``watch``: ``trainatomy.watch``.  ``history``: only PyTorch's memory history.  ``history with stacks``: with a Python
stack for each allocation, as ``trainatomy measure --trace --stacks python`` records it.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

import trainatomy

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

LIMIT = 0.03
"""Limit of the overhead, as a share of a step's time."""
FIRST_STEPS = 2
"""Steps whose modules a watch records."""
UNWATCHED = "unwatched"
QUIET = 0.2
"""Quantile of a stretch's steps that counts."""
RESAMPLINGS = 500
PAIRS, PAIR_ROUNDS = 5000, 40
"""Pairs of allocation and release in a stretch of ``parts``, and number of stretches."""
NOTED_STEPS = 200


@dataclass(frozen=True, slots=True)
class Stretch:
    """Seconds of each step, with a synchronisation after each: of the first steps and of the later ones."""

    first: tuple[float, ...]
    later: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Parts:
    """The work of a watch in a step.

    PyTorch records ``pairs`` of an allocation and its release, each in ``pair_seconds``; the notes take
    ``notes_seconds`` altogether.
    """

    pairs: int
    pair_seconds: float
    notes_seconds: float

    @property
    def seconds(self) -> float:
        """Seconds in a step."""
        return self.pairs * self.pair_seconds + self.notes_seconds


@dataclass(frozen=True, slots=True)
class Cost:
    """The overhead of one way of watching, as shares of an unwatched step.

    ``overhead`` is that of quiet steps, with a 95 % ``interval``; ``first`` that of the steps with recorded modules.
    """

    name: str
    step_seconds: float
    overhead: float
    interval: tuple[float, float]
    first: float

    @property
    def verdict(self) -> str:
        """The verdict: the limit is kept, broken, or the interval contains it."""
        low, high = self.interval
        return "kept" if high <= LIMIT else "broken" if low > LIMIT else "undecided: run more rounds"


def stretch(
    step: Callable[[], None], steps: int, around: AbstractContextManager[Any], wait: Callable[[], None]
) -> Stretch:
    """Time one stretch of steps inside ``around``, whose entry and exit are not timed."""
    gc.collect()
    with around:
        marks = [_now(wait)]
        for _ in range(FIRST_STEPS + steps):
            step()
            marks.append(_now(wait))
    each = tuple(after - before for before, after in pairwise(marks))
    return Stretch(each[:FIRST_STEPS], each[FIRST_STEPS:])


def _now(wait: Callable[[], None]) -> float:
    wait()
    return time.perf_counter()


def measure(
    step: Callable[[], None],
    ways: dict[str, Callable[[], AbstractContextManager[Any]]],
    rounds: int,
    steps: int,
    wait: Callable[[], None],
) -> list[dict[str, Stretch]]:
    """Time one stretch of each way per round, in random order."""
    chance = random.Random(0)
    names, found = list(ways), []
    for _ in range(rounds):
        chance.shuffle(names)
        found.append({name: stretch(step, steps, ways[name](), wait) for name in names})
    return found


def quiet(seconds: Iterable[float]) -> float:
    """Return the time of a quiet step: the quantile ``QUIET``."""
    ordered = sorted(seconds)
    return ordered[int(QUIET * (len(ordered) - 1))]


def cost(name: str, rounds: Sequence[dict[str, Stretch]]) -> Cost:
    """Return the overhead of ``name`` over the unwatched stretches of the same rounds."""
    chance = random.Random(0)
    added = [quiet(one[name].later) / quiet(one[UNWATCHED].later) - 1 for one in rounds]
    drawn = sorted(median(chance.choices(added, k=len(added))) for _ in range(RESAMPLINGS))
    firsts = [sum(one[name].first) / sum(one[UNWATCHED].first) - 1 for one in rounds]
    interval = drawn[RESAMPLINGS // 40], drawn[-RESAMPLINGS // 40 - 1]
    return Cost(name, median(quiet(one[name].later) for one in rounds), median(added), interval, median(firsts))


def report(rounds: Sequence[dict[str, Stretch]], names: Sequence[str], found: Parts | None = None) -> str:
    """Return a Markdown table with a line for each way and, below it, the overhead by parts."""
    plain = median(quiet(one[UNWATCHED].later) for one in rounds)
    lines = [
        f"A quiet unwatched step takes {plain * 1000:.2f} ms; {len(rounds)} rounds.",
        "",
        "| | a quiet step, ms | overhead | 95 % interval | first two steps | limit of 3 % |",
        "| --- | ---: | ---: | --- | ---: | --- |",
    ]
    for one in (cost(name, rounds) for name in names):
        low, high = one.interval
        lines.append(
            f"| {one.name} | {one.step_seconds * 1000:.2f} | {one.overhead:+.2%} | {low:+.2%} to {high:+.2%} | "
            f"{one.first:+.1%} | {one.verdict} |"
        )
    if found is not None:
        lines += [
            "",
            f"By its parts a watch takes {found.seconds * 1000:.2f} ms of a step, {found.seconds / plain:.2%}: "
            f"{found.pairs:,} allocations and releases at {found.pair_seconds * 1e9:.0f} ns, and notes in "
            f"{found.notes_seconds * 1e6:.0f} µs.",
        ]
    return "\n".join(lines)


@contextmanager
def history(context: str | None) -> Iterator[None]:
    """Record only PyTorch's memory history, as a watch does (``context`` None) or with Python stacks ("all")."""
    from trainatomy.integrations.windows import RING_EVENTS

    torch.cuda.memory._record_memory_history(
        enabled="all", context=context, stacks="python", max_entries=RING_EVENTS, clear_history=True
    )
    try:
        yield
    finally:
        torch.cuda.memory._record_memory_history(enabled=None, clear_history=True)


def parts(model: nn.Module, optimizer: torch.optim.Optimizer, step: Callable[[], None]) -> Parts:
    """Time the parts of a watch after its first steps."""
    from trainatomy.integrations.live_measurement import LiveMeasurement
    from trainatomy.measurement.step.recorder import read_counters

    live = LiveMeasurement(model, optimizer)
    live.start()
    for _ in range(FIRST_STEPS + 1):
        step()
    device = torch.cuda.current_device()
    before = read_counters(device).events
    step()
    events = read_counters(device).events - before
    noted = [_seconds(partial(_note_a_step, live.recorder)) for _ in range(NOTED_STEPS)]
    live.stop()
    unwritten, written = [], []
    for _ in range(PAIR_ROUNDS):
        unwritten.append(_seconds(_pairs))
        with history(None):
            written.append(_seconds(_pairs))
    return Parts(events // 2, (median(written) - median(unwritten)) / PAIRS, median(noted))


def _note_a_step(notes: Any) -> None:
    notes.step_begin(0)
    notes.batch((), {})
    notes.micro_step_begin(0)
    notes.forward_end()
    notes.micro_step_end(0)
    notes.optimizer_begin()
    notes.optimizer_end()
    notes.tick()
    notes.zero_grad_begin()
    notes.zero_grad_end()
    notes.step_end(0)


def _pairs() -> None:
    for _ in range(PAIRS):
        torch.empty(1024, device="cuda")


def _seconds(work: Callable[[], None]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def ways_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Callable[[], AbstractContextManager[Any]]]:
    """Return the ways of watching that take turns."""
    return {
        UNWATCHED: nullcontext,
        "watch": partial(trainatomy.watch, model, optimizer),
        "history": partial(history, None),
        "history with stacks": partial(history, "all"),
    }


def training(options: argparse.Namespace, device: str) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], None]]:
    """Return a BERT that classifies random sentences under autocast, its optimizer and its step."""
    from transformers import BertConfig, BertForSequenceClassification

    heads = max(1, options.hidden // 64)
    sizes = {"hidden_size": options.hidden, "intermediate_size": 4 * options.hidden, "num_attention_heads": heads}
    model = BertForSequenceClassification(BertConfig(num_hidden_layers=options.layers, **sizes)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    tokens = torch.randint(1000, (options.batch, options.length), device=device)
    labels = torch.randint(2, (options.batch,), device=device)

    def step() -> None:
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = model(input_ids=tokens, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Measure the overhead of watching a training.")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--steps", type=int, default=6, help="timed steps of a stretch, after the first two")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--ways", nargs="+", metavar="WAY", help="ways of watching to time (default: all)")
    parser.add_argument("--json", type=Path, help="write all stretches into this file")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        raise SystemExit("PyTorch finds no GPU on this machine: the overhead of watching can only be measured on one.")
    model, optimizer, step = training(options, "cuda")
    ways = {
        name: way
        for name, way in ways_of(model, optimizer).items()
        if not options.ways or name in (UNWATCHED, *options.ways)
    }
    measure(step, ways, 1, FIRST_STEPS, torch.cuda.synchronize)  # warm up, each way
    found = parts(model, optimizer, step)
    rounds = measure(step, ways, options.rounds, options.steps, torch.cuda.synchronize)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; {options}")
    print(report(rounds, [name for name in ways if name != UNWATCHED], found))
    if options.json is not None:
        stretches = [{name: asdict(one) for name, one in each.items()} for each in rounds]
        options.json.write_text(json.dumps({"parts": asdict(found), "rounds": stretches}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
