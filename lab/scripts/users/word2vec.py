"""Skip-gram with negative sampling: sparse gradients, SparseAdam, an alias table of word frequencies."""

import collections, random
import torch, torch.nn as nn, torch.nn.functional as F
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Pairs(IterableDataset):
    def __init__(self, words, window=5):
        self.words, self.window = words, window

    def __iter__(self):
        info = get_worker_info()
        rng = random.Random(0 if info is None else info.id)
        for i in range(self.window, len(self.words) - self.window):
            for _ in range(4):
                yield self.words[i], self.words[i + rng.choice([-1, 1]) * rng.randint(1, self.window)]


class SkipGram(nn.Module):
    def __init__(self, vocab, dim):
        super().__init__()
        self.near, self.far = nn.Embedding(vocab, dim, sparse=True), nn.Embedding(vocab, dim, sparse=True)
        nn.init.uniform_(self.near.weight, -0.5 / dim, 0.5 / dim)
        nn.init.zeros_(self.far.weight)

    def forward(self, a, b, noise):
        u, v, n = self.near(a), self.far(b), self.far(noise)
        good = F.logsigmoid((u * v).sum(-1))
        bad = F.logsigmoid(-torch.bmm(n, u.unsqueeze(-1)).squeeze(-1)).sum(-1)
        return -(good + bad).mean()


vocab, dim = 400_000, 300
rng = random.Random(1)
text = [min(vocab - 1, int(rng.paretovariate(0.8))) for _ in range(60_000)]
counts = collections.Counter(text)
weights = torch.zeros(vocab)
for word, count in counts.items():
    weights[word] = count**0.75
device = torch.device("cuda")
weights = (weights + 1e-6).to(device)
model = SkipGram(vocab, dim).to(device)
opt = torch.optim.SparseAdam(list(model.parameters()), lr=1e-3)
loader = DataLoader(Pairs(text), batch_size=8192, num_workers=1)
for step, (a, b) in enumerate(loader):
    a, b = a.to(device), b.to(device)
    noise = torch.multinomial(weights, a.numel() * 10, replacement=True).view(-1, 10)
    opt.zero_grad()
    loss = model(a, b, noise)
    loss.backward()
    opt.step()
    if step == 6:
        break
    print(step, loss.item())
torch.save(model.near.weight.detach().cpu(), "vectors.pt")
