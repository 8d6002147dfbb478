"""GPT-2 from its configuration with transformers' Trainer, on random tokens."""

import sys

import torch
from transformers import AutoConfig, AutoModelForCausalLM, HfArgumentParser, Trainer, TrainingArguments


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 512

    def __getitem__(self, index):
        ids = torch.randint(0, 50257, (512,))
        return {"input_ids": ids, "labels": ids}


if __name__ == "__main__":
    (arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(
        ["--output_dir", "out", "--bf16", "--per_device_train_batch_size", "8", "--report_to", "none", *sys.argv[1:]]
    )
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2"))
    Trainer(model, arguments, train_dataset=Rows()).train()
