"""Fine-tune a small RoBERTa with accelerate: accumulation, warm-up, save_state and resuming."""

import argparse, logging, math, os, shutil
import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed
from torch.utils.data import DataLoader, Dataset
from transformers import RobertaConfig, RobertaForSequenceClassification, get_cosine_schedule_with_warmup

logger = logging.getLogger(__name__)


class Reviews(Dataset):
    def __init__(self, n, length):
        g = torch.Generator().manual_seed(n)
        self.ids = torch.randint(5, 20000, (n, length), generator=g)
        self.y = torch.randint(0, 4, (n,), generator=g)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return {"input_ids": self.ids[i], "attention_mask": torch.ones_like(self.ids[i]), "labels": self.y[i]}


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--output_dir", default="accel_out")
    p.add_argument("--checkpointing_steps", type=int, default=1)
    p.add_argument("--resume", action="store_true")
    p.add_argument("--gradient_accumulation_steps", type=int, default=2)
    p.add_argument("--per_device_train_batch_size", type=int, default=16)
    p.add_argument("--epochs", type=int, default=2)
    args = p.parse_args()
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
    acc = Accelerator(
        gradient_accumulation_steps=args.gradient_accumulation_steps, mixed_precision="bf16",
        project_config=ProjectConfiguration(project_dir=args.output_dir, automatic_checkpoint_naming=True, total_limit=2),
    )  # fmt: skip
    set_seed(17)
    model = RobertaForSequenceClassification(
        RobertaConfig(vocab_size=20000, num_hidden_layers=5, hidden_size=512, num_attention_heads=8,
                      intermediate_size=2048, num_labels=4)
    )  # fmt: skip
    decay, rest = [], []
    for name, one in model.named_parameters():
        (rest if name.endswith("bias") or "LayerNorm" in name else decay).append(one)
    opt = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.01}, {"params": rest, "weight_decay": 0.0}], lr=5e-5, betas=(0.9, 0.98)
    )
    train = DataLoader(Reviews(512, 192), batch_size=args.per_device_train_batch_size, shuffle=True, drop_last=True)
    valid = DataLoader(Reviews(96, 192), batch_size=32)
    total = args.epochs * math.ceil(len(train) / args.gradient_accumulation_steps)
    sched = get_cosine_schedule_with_warmup(opt, max(1, total // 10), total)
    model, opt, train, valid, sched = acc.prepare(model, opt, train, valid, sched)
    acc.register_for_checkpointing(sched)
    done = 0
    for epoch in range(args.epochs):
        model.train()
        running = torch.zeros((), device=acc.device)
        for batch in train:
            with acc.accumulate(model):
                out = model(**batch)
                running += out.loss.detach()
                acc.backward(out.loss)
                if acc.sync_gradients:
                    acc.clip_grad_norm_(model.parameters(), 1.0)
                opt.step()
                sched.step()
                opt.zero_grad()
            if acc.sync_gradients:
                done += 1
                if done % args.checkpointing_steps == 0 and done <= 2:
                    acc.save_state()
                if done == 2:
                    acc.load_state(os.path.join(args.output_dir, "checkpoints", "checkpoint_0"))
                logger.info("step %d loss %.4f lr %.2e", done, running.item() / done, sched.get_last_lr()[0])
            if done == 8:
                break
        model.eval()
        right = seen = 0
        for batch in valid:
            with torch.no_grad():
                logits = model(**batch).logits
            guess, ref = acc.gather_for_metrics((logits.argmax(-1), batch["labels"]))
            right += (guess == ref).sum().item()
            seen += len(ref)
        acc.print(f"epoch {epoch}: accuracy {right / seen:.3f}")
        break
    acc.wait_for_everyone()
    acc.unwrap_model(model).save_pretrained(args.output_dir, save_function=acc.save)
    shutil.rmtree(args.output_dir, ignore_errors=True)


if __name__ == "__main__":
    main()
