import torch, torch.nn as nn, torch.nn.functional as F
from torch.utils.checkpoint import checkpoint


class LlamaMLP(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.gate, self.up, self.down = (
            nn.Linear(d, h, bias=False),
            nn.Linear(d, h, bias=False),
            nn.Linear(h, d, bias=False),
        )

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Attn(nn.Module):
    def __init__(self, d, heads, kv):
        super().__init__()
        self.h, self.kv, self.hd = heads, kv, d // heads
        self.q, self.k, self.v, self.o = (
            nn.Linear(d, d, bias=False),
            nn.Linear(d, kv * self.hd, bias=False),
            nn.Linear(d, kv * self.hd, bias=False),
            nn.Linear(d, d, bias=False),
        )

    def forward(self, x, cos, sin):
        b, t, d = x.shape
        q = self.q(x).view(b, t, self.h, self.hd).transpose(1, 2)
        k = self.k(x).view(b, t, self.kv, self.hd).transpose(1, 2)
        v = self.v(x).view(b, t, self.kv, self.hd).transpose(1, 2)
        rot = lambda z: torch.cat((-z[..., self.hd // 2 :], z[..., : self.hd // 2]), -1)
        q, k = q * cos + rot(q) * sin, k * cos + rot(k) * sin
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(o.transpose(1, 2).reshape(b, t, d))


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.n1, self.n2 = nn.RMSNorm(d), nn.RMSNorm(d)
        self.attn, self.mlp = Attn(d, 16, 4), LlamaMLP(d, int(8 / 3 * d) // 64 * 64)

    def forward(self, x, cos, sin):
        x = x + self.attn(self.n1(x), cos, sin)
        return x + self.mlp(self.n2(x))


def chunk_loss(h, w, y):
    return F.cross_entropy((h @ w.t()).float(), y, reduction="sum")


class Llama(nn.Module):
    def __init__(self, vocab=128256, d=1024, layers=6):
        super().__init__()
        self.emb = nn.Embedding(vocab, d)
        self.blocks = nn.ModuleList([Block(d) for _ in range(layers)])
        self.norm = nn.RMSNorm(d)
        inv = 1.0 / (500000 ** (torch.arange(0, 64, 2).float() / 64))
        f = torch.outer(torch.arange(2048).float(), inv)
        f = torch.cat((f, f), -1)
        self.register_buffer("cos", f.cos()), self.register_buffer("sin", f.sin())

    def forward(self, ids, labels, chunks=8):
        x = self.emb(ids)
        cos, sin = self.cos[: ids.size(1)].to(x.dtype), self.sin[: ids.size(1)].to(x.dtype)
        for blk in self.blocks:
            x = checkpoint(blk, x, cos, sin, use_reentrant=False)
        x = self.norm(x).flatten(0, 1)
        total = x.new_zeros((), dtype=torch.float32)
        for h, y in zip(x.chunk(chunks), labels.flatten().chunk(chunks)):
            total = total + checkpoint(chunk_loss, h, self.emb.weight, y, use_reentrant=False)
        return total / labels.numel()


torch.set_float32_matmul_precision("high")
torch.set_default_dtype(torch.bfloat16)
with torch.device("cuda"):
    model = Llama()
torch.set_default_dtype(torch.float32)
opt = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
for i in range(4):
    ids = torch.randint(0, 128256, (4, 2049), device="cuda")
    loss = model(ids[:, :-1], ids[:, 1:].contiguous())
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
    opt.zero_grad()
    print(i, loss.item(), torch.cuda.max_memory_reserved() / 2**30)
