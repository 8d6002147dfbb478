import torch, torch.nn as nn, numpy as np

dev = "cuda"
N_TABLES, ROWS, D, B = 8, 200_000, 64, 2048


class DLRM(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.ModuleList([nn.EmbeddingBag(ROWS, D, mode="sum", sparse=True) for _ in range(N_TABLES)])
        self.bot = nn.Sequential(
            nn.Linear(13, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, D), nn.ReLU()
        )
        n = N_TABLES + 1
        self.top = nn.Sequential(
            nn.Linear(D + n * (n - 1) // 2, 512),
            nn.ReLU(),
            nn.Linear(512, 256),
            nn.ReLU(),
            nn.Linear(256, 1),
            nn.Sigmoid(),
        )

    def forward(self, dense, idx, off):
        x = self.bot(dense)
        es = [e(idx[k], off[k]) for k, e in enumerate(self.emb)]
        T = torch.cat([x] + es, 1).view(x.size(0), -1, D)
        Z = torch.bmm(T, T.transpose(1, 2))
        n = T.size(1)
        li = torch.tensor([i for i in range(n) for j in range(i)])
        lj = torch.tensor([j for i in range(n) for j in range(i)])
        return self.top(torch.cat([x, Z[:, li, lj]], 1))


class RandomClicks(torch.utils.data.IterableDataset):
    def __iter__(self):
        rng = np.random.default_rng(0)
        for _ in range(10):
            bags = rng.integers(1, 4, (N_TABLES, B))
            idx = [torch.from_numpy(rng.integers(0, ROWS, b.sum())) for b in bags]
            off = [torch.from_numpy(np.concatenate([[0], np.cumsum(b)[:-1]])) for b in bags]
            yield (
                torch.from_numpy(rng.standard_normal((B, 13)).astype(np.float32)),
                idx,
                off,
                torch.from_numpy(rng.integers(0, 2, (B, 1))).float(),
            )


model = DLRM().to(dev)
sparse = [p for e in model.emb for p in e.parameters()]
dense = list(model.bot.parameters()) + list(model.top.parameters())
so, do = torch.optim.SparseAdam(sparse, lr=1e-3), torch.optim.Adagrad(dense, lr=1e-2)
bce = nn.BCELoss()
for it, (x, idx, off, y) in enumerate(torch.utils.data.DataLoader(RandomClicks(), batch_size=None)):
    x, y = x.to(dev), y.to(dev)
    idx, off = [i.to(dev) for i in idx], [o.to(dev) for o in off]
    so.zero_grad()
    do.zero_grad()
    loss = bce(model(x, idx, off), y)
    loss.backward()
    so.step()
    do.step()
    print(it, loss.item())
