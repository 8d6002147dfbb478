import torch, torch.nn as nn, torch.nn.functional as F


class Expert(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.w1, self.w2, self.w3 = (
            nn.Linear(d, h, bias=False),
            nn.Linear(h, d, bias=False),
            nn.Linear(d, h, bias=False),
        )

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class SparseMoE(nn.Module):
    def __init__(self, d, h, experts=8, k=2):
        super().__init__()
        self.k, self.n = k, experts
        self.gate = nn.Linear(d, experts, bias=False)
        self.experts = nn.ModuleList([Expert(d, h) for _ in range(experts)])
        self.aux = 0.0

    def forward(self, x):
        b, t, d = x.shape
        x = x.view(-1, d)
        logits = self.gate(x)
        weights, selected = torch.topk(logits, self.k)
        weights = F.softmax(weights, dim=1, dtype=torch.float).to(x.dtype)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows, nth = torch.where(selected == i)
            if rows.numel() == 0:
                continue
            out.index_add_(0, rows, (weights[rows, nth, None] * expert(x[rows])).to(out.dtype))
        p = F.softmax(logits.float(), dim=-1).mean(0)
        f = F.one_hot(selected, self.n).float().sum(1).mean(0)
        self.aux = self.n * (p * f).sum()
        return out.view(b, t, d)


class Block(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.o, self.heads = nn.Linear(d, 3 * d), nn.Linear(d, d), heads
        self.moe = SparseMoE(d, 2 * d)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d))
        return x + self.moe(self.ln2(x))


class LM(nn.Module):
    def __init__(self, vocab=8192, d=512, layers=4):
        super().__init__()
        self.emb, self.pos = nn.Embedding(vocab, d), nn.Embedding(512, d)
        self.blocks = nn.ModuleList([Block(d, 8) for _ in range(layers)])
        self.head = nn.Linear(d, vocab)

    def forward(self, ids, labels):
        x = self.emb(ids) + self.pos(torch.arange(ids.size(1), device=ids.device))
        for b in self.blocks:
            x = b(x)
        loss = F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())
        return loss + 0.01 * sum(b.moe.aux for b in self.blocks)


model = LM().to("cuda")
opt = torch.optim.AdamW(model.parameters(), 3e-4, fused=True)
for step in range(10):
    ids = torch.randint(0, 8192, (16, 257), device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        loss = model(ids[:, :-1], ids[:, 1:])
    loss.backward()
    opt.step()
    opt.zero_grad()
    print(step, float(loss))
