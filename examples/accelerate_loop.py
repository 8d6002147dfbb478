"""Watch the Accelerate loop of the guide: gradient accumulation, checkpointing and mixed precision.

python examples/accelerate_loop.py [--batch 4] [--accumulate 2] [--no-checkpointing] [--fp16]
"""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification

import trainatomy

SAMPLES, LENGTH, VOCABULARY = 64, 64, 1000


def samples() -> list[dict[str, torch.Tensor]]:
    """Return random sentences with random labels."""
    generator = torch.Generator().manual_seed(0)
    return [
        {
            "input_ids": torch.randint(VOCABULARY, (LENGTH,), generator=generator),
            "labels": torch.randint(2, (), generator=generator),
        }
        for _ in range(SAMPLES)
    ]


def main(arguments: list[str] | None = None) -> trainatomy.Watch:
    parser = argparse.ArgumentParser(description="Watch an Accelerate loop.")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--checkpointing", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--fp16", action="store_true")
    options = parser.parse_args(arguments)

    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=128, num_hidden_layers=2, num_attention_heads=2, intermediate_size=512
    )
    model = BertForSequenceClassification(config)
    if options.checkpointing:
        model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5)

    accelerator = Accelerator(
        mixed_precision="fp16" if options.fp16 and torch.cuda.is_available() else "no",
        gradient_accumulation_steps=options.accumulate,
    )
    model, optimizer, batches = accelerator.prepare(model, optimizer, DataLoader(samples(), batch_size=options.batch))

    model.train()
    with trainatomy.watch(model, optimizer) as anatomy:
        for batch in batches:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()

    print(f"Loss: {loss.item():.3f}")
    anatomy.print()
    trainatomy.print_gpu_utilization()
    return anatomy


if __name__ == "__main__":
    main()
