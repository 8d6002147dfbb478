"""Truncated back-propagation through time, ReduceLROnPlateau, early stopping, tied embeddings, best state kept."""

import copy, math
import torch, torch.nn as nn


def batchify(tokens, rows):
    n = tokens.numel() // rows
    return tokens[: n * rows].view(rows, n).t().contiguous()


class WeightDrop(nn.Module):
    def __init__(self, p=0.4):
        super().__init__()
        self.p = p

    def forward(self, x):
        if not self.training:
            return x
        mask = x.new_empty(1, x.size(1), x.size(2)).bernoulli_(1 - self.p) / (1 - self.p)
        return x * mask


class LM(nn.Module):
    def __init__(self, vocab=20000, emb=512, hidden=1024, layers=3):
        super().__init__()
        sizes = [emb] + [hidden] * (layers - 1) + [emb]
        self.enc = nn.Embedding(vocab, emb)
        self.rnns = nn.ModuleList(nn.LSTM(a, b) for a, b in zip(sizes, sizes[1:]))
        self.lock, self.dec = WeightDrop(), nn.Linear(emb, vocab)
        self.dec.weight = self.enc.weight

    def forward(self, x, state):
        h, new = self.lock(self.enc(x)), []
        raw = []
        for rnn, s in zip(self.rnns, state):
            h, s = rnn(h, s)
            raw.append(h)
            h = self.lock(h)
            new.append(s)
        return self.dec(h), new, raw[-1], h


def detached(state):
    return [None if s is None else tuple(x.detach() for x in s) for s in state]


device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
train, valid = batchify(torch.randint(20000, (200_000,)), 40).to(device), batchify(torch.randint(20000, (20_000,)), 10).to(device)
model = LM().to(device)
print(model)
opt = torch.optim.ASGD(model.parameters(), lr=30, t0=0, lambd=0.0, weight_decay=1.2e-6)
plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, factor=0.25, patience=0)
best, best_state, bad = math.inf, None, 0
for epoch in range(40):
    model.train()
    state, i = [None] * 3, 0
    for steps in range(3):
        length = (70, 35, 66)[steps % 3]
        x, y = train[i : i + length], train[i + 1 : i + 1 + length]
        state = detached(state)
        opt.zero_grad()
        out, state, raw, dropped = model(x, state)
        loss = nn.functional.cross_entropy(out.view(-1, out.size(-1)), y.reshape(-1))
        total = loss + 2 * dropped.pow(2).mean() + (raw[1:] - raw[:-1]).pow(2).mean()
        total.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        opt.step()
        i += length
    model.eval()
    with torch.inference_mode():
        state, losses = [None] * 3, []
        for j in range(0, 280, 70):
            out, state, *_ = model(valid[j : j + 70], state)
            losses.append(nn.functional.cross_entropy(out.flatten(0, 1), valid[j + 1 : j + 71].flatten()))
        value = torch.stack(losses).mean().item()
    plateau.step(value)
    print(f"epoch {epoch}: perplexity {math.exp(min(value, 20)):.1f}, lr {opt.param_groups[0]['lr']}")
    if value < best:
        best, best_state, bad = value, copy.deepcopy(model.state_dict()), 0
    else:
        bad += 1
        if bad == 3:
            break
model.load_state_dict(best_state)
