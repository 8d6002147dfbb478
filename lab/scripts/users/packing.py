"""Several documents in one row: block-diagonal causal masks and positions that begin anew."""

import random
import torch, torch.nn as nn, torch.nn.functional as F
from torch.utils.data import IterableDataset, DataLoader


class Documents(IterableDataset):
    def __iter__(self):
        rng = random.Random(3)
        while True:
            yield [rng.randrange(1, 30000) for _ in range(rng.randint(20, 600))]


def packed(docs, length=1024):
    row, ends = [], []
    for doc in docs:
        row += doc
        ends.append(len(row))
        while len(row) >= length + 1:
            ids = torch.tensor(row[: length + 1])
            cuts = [e for e in ends if e < length]
            seq = torch.zeros(length, dtype=torch.long)
            for c in cuts:
                seq[c:] += 1
            yield ids, seq
            row, ends = row[length:], [e - length for e in ends if e > length]


class Packed(IterableDataset):
    def __iter__(self):
        return packed(Documents())


class GPT(nn.Module):
    def __init__(self, vocab=30000, d=512, layers=6, heads=8):
        super().__init__()
        self.emb, self.pos = nn.Embedding(vocab, d), nn.Embedding(1024, d)
        layer = lambda: nn.ModuleDict(
            dict(
                n1=nn.LayerNorm(d),
                qkv=nn.Linear(d, 3 * d),
                o=nn.Linear(d, d),
                n2=nn.LayerNorm(d),
                f=nn.Linear(d, 4 * d),
                p=nn.Linear(4 * d, d),
            )
        )
        self.layers = nn.ModuleList([layer() for _ in range(layers)])
        self.heads, self.norm = heads, nn.LayerNorm(d)

    def forward(self, ids, seq):
        b, t = ids.shape
        same = seq[:, :, None] == seq[:, None, :]
        mask = (same & torch.ones(t, t, dtype=torch.bool, device=ids.device).tril()).unsqueeze(1)
        first = torch.cat([torch.ones_like(seq[:, :1]), (seq[:, 1:] != seq[:, :-1]).long()], 1)
        index = torch.arange(t, device=ids.device).expand(b, t)
        start = torch.cummax(index * first, dim=1).values
        x = self.emb(ids) + self.pos(index - start)
        for l in self.layers:
            q, k, v = l["qkv"](l["n1"](x)).chunk(3, -1)
            q, k, v = (z.view(b, t, self.heads, -1).transpose(1, 2) for z in (q, k, v))
            a = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            x = x + l["o"](a.transpose(1, 2).reshape(b, t, -1))
            x = x + l["p"](F.gelu(l["f"](l["n2"](x)), approximate="tanh"))
        return F.linear(self.norm(x), self.emb.weight)


model = GPT().cuda()
opt = torch.optim.AdamW(model.parameters(), 3e-4)
for step, (ids, seq) in zip(range(6), DataLoader(Packed(), batch_size=8)):
    ids, seq = ids.cuda(), seq.cuda()
    with torch.autocast(device_type="cuda", dtype=torch.bfloat16):
        logits = model(ids[:, :-1], seq)
        labels = ids[:, 1:].masked_fill(torch.cat([seq[:, 1:] != seq[:, :-1], seq[:, :1] < 0], 1), -100)
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), labels.reshape(-1), ignore_index=-100)
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(step, loss.item())
