"""Train a case in this process, and write what it took of the host: ``python host_child.py CASE FOLDER OUT BILLS``.

On several GPUs, ``torchrun`` starts it for each rank, which writes ``BILLS/RANK.json``.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from host_cases import Case

from trainatomy.measurement.host_memory import HostSampler
from trainatomy.measurement.proc import resident

RANK, LOCAL_RANK = (int(os.environ.get(name, "0")) for name in ("RANK", "LOCAL_RANK"))


class Pinned:
    """What PyTorch has pinned in this process, once it is imported."""

    torch: Any = None

    def __call__(self) -> int:
        """Return the bytes, with what is kept for later."""
        if self.torch is None or not self.torch.cuda.is_initialized():
            return 0
        return int(self.torch.cuda.host_memory_stats().get("allocated_bytes.current", 0))


def main() -> None:
    """Run the case."""
    case, folder, out, bills = Case(**json.loads(sys.argv[1])), sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4])
    pinned = Pinned()
    sampler = HostSampler(pinned=pinned, folder=out, max_share=0.3)  # these trainings are short
    sampler.start()
    import torch
    import transformers

    kind = getattr(transformers, case.model)
    _ = transformers.Trainer
    pinned.torch = torch
    sampler.phase("loading")
    model = kind.from_pretrained(folder, dtype=torch.float32)
    shapes = {name: tuple(each.shape) for name, each in model.named_parameters()}
    if case.place == "cuda":
        torch.cuda.set_device(LOCAL_RANK)
    if case.place == "away":
        sum(float(parameter.sum()) for parameter in model.parameters())  # a copy to a GPU reads them
        model.to("meta")
    elif case.place == "cuda" and case.offload != "shards":
        model.to("cuda")
    if case.offload != "shards":  # accelerate makes them when the Trainer begins
        sampler.phase("training")
    _train(case, model, sampler, out, shapes)
    sampler.stop()
    bill = sampler.bill()
    assert bill is not None
    launcher = resident(os.getppid()) if case.gpus > 1 else None
    found = asdict(bill) | {"reading_seconds": sampler.reading_seconds, "launcher": launcher}
    (bills / f"{RANK}.json").write_text(json.dumps(found))


def _train(case: Case, model: Any, sampler: HostSampler, out: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """Train with the Trainer or in a plain loop: the model, or a small one that takes the same batches."""
    import numpy as np
    import torch
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Samples(torch.utils.data.Dataset[Any]):
        def __init__(self, size: int, objects: int = 0) -> None:
            self.size = size
            self.objects = [[word, float(word), str(word)] for word in range(objects * (1 << 20) // _BYTES_OF_OBJECT)]

        def __len__(self) -> int:
            return self.size

        def __getitem__(self, index: int) -> dict[str, Any]:
            for each in self.objects[index :: self.size]:
                list(each)  # counts a reference to each part, as any use does
            if case.length:
                words = torch.from_numpy(np.random.randint(0, 1000, case.length))
                label = torch.tensor(0) if "Classification" in case.model else words
                return {"input_ids": words, "attention_mask": torch.ones_like(words), "labels": label}
            side = case.config["image_size"]
            return {"pixel_values": torch.zeros(3, side, side), "labels": torch.tensor(0)}

    class Small(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(8, 8)
            self.gathered: list[Any] = []

        def forward(self, labels: Any, **inputs: Any) -> dict[str, Any]:
            if not self.training and case.gathers:  # the outputs that an evaluation on a GPU brings to the host
                words = case.config.get("vocab_size", 2) if "Classification" not in case.model else 2
                rows = (case.length,) if "Classification" not in case.model else ()
                self.gathered.append(np.ones((len(labels), *rows, words), np.float32))
            return {"loss": self.layer(torch.ones(1, 8)).sum()}

    class Phases(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            sampler.phase("training")

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if case.saves and not is_real and state.global_step == case.steps:
                _save(shapes, sampler, out)
            sampler.phase("evaluation" if control.should_evaluate else "saving" if control.should_save else "training")

        def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            getattr(kwargs["model"], "gathered", []).clear()
            sampler.phase("saving" if control.should_save else "training")

        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            sampler.phase("training")

    is_real = case.place != "away"
    samples = Samples((case.steps + 4 + case.workers * case.prefetch) * case.batch * case.gpus, case.objects)
    if case.offload == "save_on_cpu":
        _train_plainly(case, model, samples)
        return
    evaluates, saves = bool(case.evaluates), case.saves and is_real
    arguments = TrainingArguments(
        output_dir=str(out),
        max_steps=case.steps,
        per_device_train_batch_size=case.batch,
        per_device_eval_batch_size=case.batch,
        dataloader_num_workers=case.workers,
        dataloader_prefetch_factor=case.prefetch if case.workers else None,
        optim=case.optim,
        eval_strategy="steps" if evaluates else "no",
        save_strategy="steps" if saves else "no",
        eval_steps=case.steps - 1,
        save_steps=case.steps,
        save_total_limit=1,
        use_cpu=case.place != "cuda",
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
        logging_strategy="no",
        **({"dataloader_pin_memory": False} | case.memory_arguments()),
    )
    trainer = Trainer(
        model if is_real else Small(),
        arguments,
        train_dataset=samples,
        eval_dataset=Samples(case.evaluates) if evaluates else None,
        compute_metrics=(lambda found: {}) if case.gathers and evaluates and is_real else None,
        callbacks=[Phases()],
    )
    trainer.train()


def _train_plainly(case: Case, model: Any, samples: Any) -> None:
    """Train on a GPU with saved activations on the host, as ``loop: pytorch`` with ``activation_offloading`` does."""
    import torch
    from torch.utils.data import DataLoader

    optimizer: Any = torch.optim.SGD(model.parameters(), 1e-4)
    if case.optim != "sgd":
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    loader: Any = DataLoader(
        samples,
        case.batch,
        num_workers=case.workers,
        pin_memory=case.pins,
        prefetch_factor=case.prefetch if case.workers else None,
    )
    model.train()
    for _, batch in zip(range(case.steps), loader, strict=False):
        inputs = {name: each.to("cuda", non_blocking=True) for name, each in batch.items()}
        with torch.autocast("cuda", torch.bfloat16), torch.autograd.graph.save_on_cpu(pin_memory=True):
            loss = model(**inputs).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()


_BYTES_OF_OBJECT = 80 + 8 + 32 + 32 + 64 + 32
"""Of ``[1, 1.0, "1"]`` in a list, in CPython 3.11, with what is before each part and rounds it up."""


def _save(shapes: dict[str, tuple[int, ...]], sampler: HostSampler, out: Path) -> None:
    """Copy weights of these shapes to the host, as saving them from a GPU does, and write them."""
    import torch
    from safetensors.torch import save_file

    sampler.phase("saving")
    out.mkdir(parents=True, exist_ok=True)
    save_file({name: torch.ones(shape) for name, shape in shapes.items()}, out / "model.safetensors")


if __name__ == "__main__":
    main()
