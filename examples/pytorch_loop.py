"""Watch a plain PyTorch loop and compare it with its prediction.

    python examples/pytorch_loop.py

On a GPU it trains in mixed precision with a gradient scaler.  Without one it trains on the CPU, and only
the prediction shows the memory that a GPU would need.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

import trainatomy

STEPS, BATCH = 8, 256


class Classifier(nn.Module):
    """Three layers and a loss; a batch is passed as keyword arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 1024), nn.GELU())
        self.head = nn.Linear(1024, 10)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.layers(x)), y)


def main() -> trainatomy.Watch:
    has_gpu = torch.cuda.is_available()
    device = "cuda" if has_gpu else "cpu"
    model = Classifier()
    prediction = trainatomy.predict(
        model,
        batch={"x": torch.zeros(BATCH, 256), "y": torch.zeros(BATCH, dtype=torch.long)},
        optimizer="adamw_torch",
        gpu="h200",
        fp16=True,
        max_grad_norm=0.0,
    )
    print(f"predicted for an H200, in fp16: {prediction.memory.peak_allocated_bytes:,} bytes allocated at the peak")

    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler(device, enabled=has_gpu)
    with trainatomy.watch(model, optimizer, name="classifier") as anatomy:
        for _ in range(STEPS):
            x, y = torch.randn(BATCH, 256, device=device), torch.randint(10, (BATCH,), device=device)
            with torch.autocast(device, dtype=torch.float16, enabled=has_gpu):
                loss = model(x=x, y=y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    print(f"Loss: {loss.item():.3f}")
    anatomy.print()
    return anatomy


if __name__ == "__main__":
    main()
