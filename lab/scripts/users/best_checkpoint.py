import os
import tempfile
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_default_device("cuda")
gen = torch.Generator(device="cuda").manual_seed(0)
path = os.path.join(tempfile.gettempdir(), f"best-{os.getpid()}.pt")
X, y = torch.randn(8192, 784), torch.randint(0, 10, (8192,))
train = DataLoader(TensorDataset(X[:6144], y[:6144]), batch_size=6144, shuffle=True, generator=gen)
val = DataLoader(TensorDataset(X[6144:], y[6144:]), batch_size=2048)
model = nn.Sequential(
    nn.Linear(784, 3000),
    nn.BatchNorm1d(3000),
    nn.GELU(),
    nn.Dropout(0.2),
    nn.Linear(3000, 3000),
    nn.GELU(),
    nn.Linear(3000, 10),
)
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
best, bad = float("inf"), 0
for epoch in range(30):
    model.train()
    for xb, yb in train:
        opt.zero_grad()
        loss = nn.functional.cross_entropy(model(xb), yb)
        loss.backward()
        opt.step()
    model.eval()
    with torch.inference_mode():
        v = sum(nn.functional.cross_entropy(model(xb), yb).item() * len(yb) for xb, yb in val) / 2048
    if v <= best:
        best, bad = v, 0
    else:
        bad += 1
    torch.save({"model": model.state_dict(), "opt": opt.state_dict(), "epoch": epoch}, path)
    ckpt = torch.load(path)  # roll back
    model.load_state_dict(ckpt["model"])
    opt.load_state_dict(ckpt["opt"])
    print(epoch, loss.item(), v, ckpt["epoch"], f"{torch.cuda.max_memory_allocated() / 2**20:.0f} MiB")
    if bad >= 3:
        break
os.remove(path)
