"""Choose the batch size before the first step, in place of `auto_find_batch_size` and `find_executable_batch_size`.

    python examples/fit_batch_size.py [--gpu rtx-4090]

The effective batch size stays what it was, so the same is trained on any GPU. Without `--gpu` the search is for this
machine's GPU, or for an RTX 4090 if there is none.
"""

from __future__ import annotations

import argparse
import tempfile

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

from trainatomy.integrations import fit_training_arguments, predicted_batch_size

LENGTH = 64


class RandomTokens(torch.utils.data.Dataset):
    """Random sentences with random labels, as in the guide."""

    def __init__(self, samples: int = 64, vocabulary: int = 1000) -> None:
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(vocabulary, (samples, LENGTH), generator=generator)
        self.labels = torch.randint(2, (samples,), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.labels[index]}


def with_trainer(model: torch.nn.Module, data: RandomTokens, gpu: str | None, folder: str) -> None:
    """Train with the Trainer."""
    settings = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=32,  # with one accumulation step: the effective batch size
        num_train_epochs=1,
        save_strategy="no",
        report_to="none",
    )
    settings = fit_training_arguments(settings, model, sequence_length=LENGTH, gpu=gpu)
    Trainer(model=model, args=settings, train_dataset=data).train()
    size, steps = settings.per_device_train_batch_size, settings.gradient_accumulation_steps
    print(f"Trainer: {steps} x {size} samples in each optimizer step")


def with_loop(model: torch.nn.Module, data: RandomTokens, gpu: str | None) -> None:
    """Train with a loop of one's own."""

    @predicted_batch_size(
        model=model,
        effective_batch_size=32,
        sequence_length=LENGTH,
        optimizer=torch.optim.AdamW,
        max_grad_norm=0,
        gpu=gpu,
    )
    def train(batch_size: int, accumulation_steps: int, *, epochs: int) -> None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        model.to(device).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        for _ in range(epochs):
            batches = torch.utils.data.DataLoader(data, batch_size=batch_size, shuffle=True, drop_last=True)
            for number, batch in enumerate(batches, 1):
                loss = model(**{name: value.to(device) for name, value in batch.items()}).loss
                (loss / accumulation_steps).backward()
                if number % accumulation_steps == 0:
                    optimizer.step()
                    optimizer.zero_grad()
        print(f"Loop: {accumulation_steps} x {batch_size} samples in each optimizer step")

    train(epochs=1)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Choose the batch size before the first step.")
    parser.add_argument("--gpu", help="the GPU to search for")
    gpu = parser.parse_args(arguments).gpu
    if gpu is None and not torch.cuda.is_available():
        gpu = "rtx-4090"
    config = BertConfig(
        vocab_size=1000, hidden_size=128, num_hidden_layers=2, num_attention_heads=2, intermediate_size=512
    )
    model = BertForSequenceClassification(config)
    with tempfile.TemporaryDirectory() as folder:
        with_trainer(model, RandomTokens(), gpu, folder)
    with_loop(model, RandomTokens(), gpu)


if __name__ == "__main__":
    main()
