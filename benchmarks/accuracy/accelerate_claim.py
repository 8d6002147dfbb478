"""Compare the memory of the guide's Accelerate loop with the Trainer's.  Needs a GPU.

Both train BERT-large as the guide does: batches of one sentence of 512 tokens, four accumulated per step, gradient
checkpointing, fp16, 8-bit Adam (AdamW where bitsandbytes is missing).  Each runs in a fresh process under ``watch``.
A third run adds gradient clipping to the Accelerate loop: the Trainer clips by default, the guide's loop does not.
Prints bytes and the difference from the Trainer; ``--json FILE`` keeps them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import trainatomy

if TYPE_CHECKING:
    from torch import nn

    from trainatomy.results.measurement import Measurement

LENGTH, ACCUMULATION, MAX_GRAD_NORM, LEARNING_RATE = 512, 4, 1.0, 5e-5
LOOPS = {"trainer": "Trainer", "accelerate": "Accelerate loop", "clipped": "Accelerate loop, clipped"}
FIGURES = ("peak_allocated_bytes", "peak_reserved_bytes", "device_bytes", "context_bytes")


def main(arguments: list[str] | None = None) -> int:
    """Run the loops one after the other and print their figures; in a child, run one of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--json", type=Path, help="keep the measurements here")
    parser.add_argument("--loop", choices=LOOPS, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("This check measures, so it needs a GPU; PyTorch finds none.", file=sys.stderr)
        return 7
    if options.loop:
        options.json.write_text(json.dumps(asdict(run(options.loop, options.steps))), encoding="utf-8")
        return 0
    found = {loop: in_child(loop, options.steps) for loop in LOOPS}
    print(table(found))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
    return 0


def in_child(loop: str, steps: int) -> dict[str, Any]:
    """Measure one loop in a fresh process."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result.json")
        command = [sys.executable, __file__, "--loop", loop, "--steps", str(steps), "--json", str(result)]
        subprocess.run(command, check=True)
        measurement: dict[str, Any] = json.loads(result.read_text("utf-8"))
        return measurement


def run(loop: str, steps: int) -> Measurement:
    """Run one loop under ``watch``."""
    torch.manual_seed(42)
    model, data = bert_large(), sentences(steps * ACCUMULATION)
    optimizer = adam(model)
    if loop == "trainer":
        return with_trainer(model, data, optimizer, steps)
    return with_accelerate(model, data, optimizer, clip=loop == "clipped")


def bert_large() -> Any:
    """Build BERT-large for classification with random weights; nothing is downloaded."""
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(
        BertConfig(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096)
    )


def sentences(count: int) -> list[dict[str, torch.Tensor]]:
    """Draw random sentences of the guide's shape."""
    generator = torch.Generator().manual_seed(0)
    return [
        {"input_ids": torch.randint(100, 30000, (LENGTH,), generator=generator), "labels": torch.tensor(0)}
        for _ in range(count)
    ]


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """Create the guide's optimizer, before the loop starts."""
    try:
        from bitsandbytes.optim import Adam8bit
    except ImportError:
        print("bitsandbytes is missing: AdamW instead of 8-bit Adam", file=sys.stderr)
        return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    optimizer: torch.optim.Optimizer = Adam8bit(model.parameters(), lr=LEARNING_RATE)
    return optimizer


def with_trainer(model: Any, data: Any, optimizer: torch.optim.Optimizer, steps: int) -> Measurement:
    """Train with the Trainer and the guide's settings."""
    from transformers import Trainer, TrainingArguments

    callback = trainatomy.AnatomyCallback(print=False, log=False)
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=ACCUMULATION,
            gradient_checkpointing=True,
            fp16=True,
            max_steps=steps,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = Trainer(
            model=model, args=settings, train_dataset=data, optimizers=(optimizer, None), callbacks=[callback]
        )
        trainer.train()
    assert callback.measurement is not None
    return callback.measurement


def with_accelerate(model: Any, data: Any, optimizer: Any, *, clip: bool) -> Measurement:
    """Train with the guide's loop, written for current Accelerate."""
    from accelerate import Accelerator
    from torch.utils.data import DataLoader

    model.gradient_checkpointing_enable()
    accelerator = Accelerator(mixed_precision="fp16")
    model, optimizer, batches = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=1))
    model.train()
    with trainatomy.watch(model, optimizer) as anatomy:
        for step, batch in enumerate(batches, start=1):
            loss = model(**batch).loss
            loss = loss / ACCUMULATION
            accelerator.backward(loss)
            if step % ACCUMULATION == 0:
                if clip:
                    accelerator.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
                optimizer.step()
                optimizer.zero_grad()
    assert anatomy.measurement is not None
    return anatomy.measurement


def table(found: dict[str, dict[str, Any]]) -> str:
    """Format figures and components in bytes, with their difference from the Trainer's."""
    names = list(FIGURES) + list(found["trainer"]["memory"]["components"])
    rows = [f"{'bytes':<24}" + "".join(f"{title:>34}" for title in LOOPS.values())]
    for name in names:
        figures = [found[loop].get(name, found[loop]["memory"]["components"].get(name)) for loop in LOOPS]
        base = figures[0]
        cells = [f"{figure:,} ({figure - base:+,})" if None not in (figure, base) else "-" for figure in figures]
        rows.append(f"{name:<24}" + "".join(f"{cell:>34}" for cell in cells))
    return "\n".join(rows)


if __name__ == "__main__":
    raise SystemExit(main())
