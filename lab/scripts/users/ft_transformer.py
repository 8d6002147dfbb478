"""Tabular data: an FT-Transformer on a CSV with pandas, quantile scaling, class weights, early stopping."""

import io
import numpy as np, pandas as pd
import torch, torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset, random_split

rng = np.random.default_rng(5)
text = io.StringIO()
pd.DataFrame({**{f"num{i}": rng.normal(size=6000) for i in range(40)}, **{f"cat{i}": rng.integers(0, 5 + 7 * i, 6000) for i in range(12)},
              "target": rng.choice(4, 6000, p=[0.6, 0.2, 0.15, 0.05])}).to_csv(text, index=False)  # fmt: skip
text.seek(0)
frame = pd.read_csv(text)
cats = [c for c in frame if c.startswith("cat")]
nums = [c for c in frame if c.startswith("num")]
frame[nums] = frame[nums].rank(pct=True).astype("float32")
codes = frame[cats].apply(lambda s: s.astype("category").cat.codes).to_numpy()
data = TensorDataset(torch.tensor(frame[nums].to_numpy(), dtype=torch.float32), torch.tensor(codes, dtype=torch.long), torch.tensor(frame["target"].to_numpy()))
train, valid = random_split(data, [5000, 1000], generator=torch.Generator().manual_seed(0))
sizes = [int(codes[:, i].max()) + 1 for i in range(len(cats))]
weight = torch.tensor(1 / frame["target"].value_counts(normalize=True).sort_index().to_numpy(), dtype=torch.float32)


class FT(nn.Module):
    def __init__(self, d=192, depth=4, heads=8):
        super().__init__()
        self.w, self.b = nn.Parameter(torch.randn(len(nums), d) * 0.05), nn.Parameter(torch.zeros(len(nums), d))
        self.register_buffer("offsets", torch.tensor([0] + sizes[:-1]).cumsum(0))
        self.emb, self.cls = nn.Embedding(sum(sizes), d), nn.Parameter(torch.zeros(1, 1, d))
        layer = nn.TransformerEncoderLayer(d, heads, int(d * 4 / 3) * 2, 0.2, "relu", batch_first=True, norm_first=True)
        self.enc = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Sequential(nn.LayerNorm(d), nn.ReLU(), nn.Linear(d, 4))

    def forward(self, x, c):
        tokens = torch.cat([self.cls.expand(len(x), -1, -1), x.unsqueeze(-1) * self.w + self.b, self.emb(c + self.offsets)], 1)
        return self.head(self.enc(tokens)[:, 0])


device = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
net = FT().to(device)
opt = torch.optim.AdamW(net.parameters(), 1e-4, weight_decay=1e-5)
criterion = nn.CrossEntropyLoss(weight=weight.to(device))
best, patience = np.inf, 0
for epoch in range(50):
    net.train()
    for i, (x, c, y) in enumerate(DataLoader(train, 512, shuffle=True)):
        loss = criterion(net(x.to(device), c.to(device)), y.to(device))
        opt.zero_grad()
        loss.backward()
        opt.step()
        if i == 3:
            break
    net.eval()
    preds, losses = [], []
    with torch.no_grad():
        for x, c, y in DataLoader(valid, 1000):
            out = net(x.to(device), c.to(device))
            losses.append(criterion(out, y.to(device)).item())
            preds.append(out.softmax(-1).cpu().numpy())
    guess = np.concatenate(preds).argmax(1)
    print(epoch, np.mean(losses), np.bincount(guess, minlength=4))
    if np.mean(losses) < best - 1e-4:
        best, patience = np.mean(losses), 0
        torch.save(net.state_dict(), "best.pt")
    elif (patience := patience + 1) > 5:
        break
net.load_state_dict(torch.load("best.pt", map_location=device, weights_only=True))
