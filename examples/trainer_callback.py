"""Watch a Hugging Face Trainer: memory by component in its logs, a summary at the end, a record of the run.

    python examples/trainer_callback.py [--records FOLDER] [--report-to tensorboard]

The logs reach every tracker in `report_to` (TensorBoard, W&B, MLflow, Trackio).
"""

from __future__ import annotations

import argparse
import tempfile

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

import trainatomy


class RandomTokens(torch.utils.data.Dataset):
    """Random sentences with random labels, as in the guide."""

    def __init__(self, samples: int = 64, length: int = 64, vocabulary: int = 1000) -> None:
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(vocabulary, (samples, length), generator=generator)
        self.labels = torch.randint(2, (samples,), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.labels[index]}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Watch a Trainer.")
    parser.add_argument("--records", help="write a record of the run into this folder")
    parser.add_argument("--report-to", default="none")
    options = parser.parse_args(arguments)

    config = BertConfig(
        vocab_size=1000, hidden_size=128, num_hidden_layers=2, num_attention_heads=2, intermediate_size=512
    )
    model = BertForSequenceClassification(config)
    trainatomy.print_gpu_utilization()

    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            gradient_checkpointing=True,
            bf16=torch.cuda.is_available(),
            num_train_epochs=1,
            logging_steps=2,
            save_strategy="no",
            report_to=options.report_to,
        )
        trainer = Trainer(model=model, args=settings, train_dataset=RandomTokens())
        callback = trainatomy.AnatomyCallback(records=options.records, predict=True)
        trainer.add_callback(callback)
        result = trainer.train()

    trainatomy.print_summary(result)
    if callback.measurement is not None and callback.measurement.memory is not None:
        activations = callback.measurement.memory.components.activations
        print(f"Activations at the peak: {activations:,} bytes")


if __name__ == "__main__":
    main()
