#!/usr/bin/env python
"""Fine-tune a causal language model on a text file without the Trainer (after run_clm_no_trainer)."""

import argparse, logging, math, os
from itertools import chain

import datasets, torch, transformers
from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import set_seed
from datasets import Dataset
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import GPT2Config, GPT2LMHeadModel, SchedulerType, default_data_collator, get_scheduler

logger = get_logger(__name__)


def parse_args():
    p = argparse.ArgumentParser()
    p.add_argument("--per_device_train_batch_size", type=int, default=8)
    p.add_argument("--block_size", type=int, default=512)
    p.add_argument("--gradient_accumulation_steps", type=int, default=2)
    p.add_argument("--max_train_steps", type=int, default=6)
    p.add_argument("--lr_scheduler_type", type=SchedulerType, default="linear")
    p.add_argument("--seed", type=int, default=7)
    p.add_argument("--output_dir", default="out-clm")
    return p.parse_args()


def main():
    args = parse_args()
    accelerator = Accelerator(gradient_accumulation_steps=args.gradient_accumulation_steps, mixed_precision="bf16")
    logging.basicConfig(level=logging.INFO)
    logger.info(accelerator.state, main_process_only=False)
    datasets.utils.logging.set_verbosity_error()
    transformers.utils.logging.set_verbosity_error()
    set_seed(args.seed)
    if accelerator.is_main_process:
        os.makedirs(args.output_dir, exist_ok=True)
    accelerator.wait_for_everyone()
    raw = Dataset.from_dict({"text": [" ".join(str((i * 31 + j) % 997) for j in range(400)) for i in range(200)]})
    config = GPT2Config(n_layer=6, n_embd=512, n_head=8, n_positions=1024)
    model = GPT2LMHeadModel(config)
    tokenize = lambda rows: {"input_ids": [[int(w) for w in t.split()] for t in rows["text"]]}

    def group_texts(examples):
        joined = {k: list(chain(*examples[k])) for k in examples}
        total = len(joined["input_ids"]) // args.block_size * args.block_size
        result = {k: [t[i : i + args.block_size] for i in range(0, total, args.block_size)] for k, t in joined.items()}
        result["labels"] = result["input_ids"].copy()
        return result

    with accelerator.main_process_first():
        tokenized = raw.map(tokenize, batched=True, remove_columns=["text"])
        lm = tokenized.map(group_texts, batched=True)
    train = lm.select(range(len(lm) - 16))
    evaluation = lm.select(range(len(lm) - 16, len(lm)))
    train_loader = DataLoader(
        train, shuffle=True, collate_fn=default_data_collator, batch_size=args.per_device_train_batch_size
    )
    eval_loader = DataLoader(evaluation, collate_fn=default_data_collator, batch_size=8)
    no_decay = ["bias", "layer_norm.weight"]
    groups = [
        {
            "params": [p for n, p in model.named_parameters() if not any(nd in n for nd in no_decay)],
            "weight_decay": 0.01,
        },
        {"params": [p for n, p in model.named_parameters() if any(nd in n for nd in no_decay)], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=5e-5)
    scheduler = get_scheduler(
        args.lr_scheduler_type, optimizer, num_warmup_steps=0, num_training_steps=args.max_train_steps
    )
    model, optimizer, train_loader, eval_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, eval_loader, scheduler
    )
    bar = tqdm(range(args.max_train_steps), disable=not accelerator.is_local_main_process)
    done, total_loss = 0, 0
    while done < args.max_train_steps:
        model.train()
        for batch in train_loader:
            with accelerator.accumulate(model):
                outputs = model(**batch)
                total_loss += outputs.loss.detach().float()
                accelerator.backward(outputs.loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                bar.update(1)
                done += 1
            if done >= args.max_train_steps:
                break
        model.eval()
        losses = []
        for batch in eval_loader:
            with torch.no_grad():
                loss = model(**batch).loss
            losses.append(accelerator.gather_for_metrics(loss.repeat(8)))
        try:
            perplexity = math.exp(torch.mean(torch.cat(losses)))
        except OverflowError:
            perplexity = float("inf")
        logger.info(f"perplexity {perplexity}")
        accelerator.save_state(os.path.join(args.output_dir, "step"))
    accelerator.unwrap_model(model).save_pretrained(args.output_dir, save_function=accelerator.save)


if __name__ == "__main__":
    main()
