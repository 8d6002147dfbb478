"""A small GPT in the style of the speedruns: Muon for matrices, Adam for the rest, rotary, QK norm, relu squared."""

import os
import time
import torch
import torch.nn as nn
import torch.nn.functional as F


def zeropower_via_newtonschulz5(G, steps=5):
    assert G.ndim >= 2
    a, b, c = (3.4445, -4.7750, 2.0315)
    X = G.bfloat16()
    if G.size(-2) > G.size(-1):
        X = X.mT
    X = X / (X.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        A = X @ X.mT
        B = b * A + c * A @ A
        X = a * X + B @ X
    if G.size(-2) > G.size(-1):
        X = X.mT
    return X


class Muon(torch.optim.Optimizer):
    def __init__(self, params, lr=0.02, momentum=0.95, nesterov=True):
        super().__init__(list(params), dict(lr=lr, momentum=momentum, nesterov=nesterov))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                g = p.grad
                state = self.state[p]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(g)
                buf = state["momentum_buffer"]
                buf.lerp_(g, 1 - group["momentum"])
                g = g.lerp_(buf, group["momentum"]) if group["nesterov"] else buf
                g = zeropower_via_newtonschulz5(g)
                p.add_(g.type_as(p), alpha=-group["lr"] * max(1, p.size(-2) / p.size(-1)) ** 0.5)


class Rotary(nn.Module):
    def __init__(self, dim, max_seq_len=2048):
        super().__init__()
        f = (1 / 1024) ** torch.linspace(0, 1, steps=dim // 4, dtype=torch.float32)
        f = torch.cat([f, f.new_zeros(dim // 4)])
        theta = torch.einsum("i,j -> ij", torch.arange(max_seq_len, dtype=torch.float32), f)
        self.cos = nn.Buffer(theta.cos(), persistent=False)
        self.sin = nn.Buffer(theta.sin(), persistent=False)

    def forward(self, x):
        cos, sin = self.cos[None, : x.size(-3), None, :], self.sin[None, : x.size(-3), None, :]
        x1, x2 = x.to(dtype=torch.float32).chunk(2, dim=-1)
        return torch.cat((x1 * cos + x2 * sin, x1 * (-sin) + x2 * cos), 3).type_as(x)


def norm(x):
    return F.rms_norm(x, (x.size(-1),))


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv_w = nn.Parameter(torch.empty(3, dim, dim).uniform_(-0.03, 0.03))
        self.rotary = Rotary(dim // heads)
        self.c_proj = nn.Linear(dim, dim, bias=False)
        self.c_proj.weight.data.zero_()

    def forward(self, x, ve):
        B, T, D = x.shape
        q, k, v = F.linear(x, self.qkv_w.flatten(end_dim=1).type_as(x)).view(B, T, 3 * self.heads, -1).chunk(3, dim=-2)
        q, k = self.rotary(norm(q)), self.rotary(norm(k))
        v = v + ve.view_as(v)
        y = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, D))


class Layer(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.attn = Attention(dim, heads)
        self.c_fc, self.c_proj = nn.Linear(dim, 4 * dim, bias=False), nn.Linear(4 * dim, dim, bias=False)
        self.c_proj.weight.data.zero_()
        self.lambdas = nn.Parameter(torch.tensor([1.0, 0.0]))

    def forward(self, x, ve, x0):
        x = self.lambdas[0] * x + self.lambdas[1] * x0
        x = x + self.attn(norm(x), ve)
        return x + self.c_proj(F.relu(self.c_fc(norm(x))).square())


class GPT(nn.Module):
    def __init__(self, vocab, layers, dim, heads):
        super().__init__()
        self.embed, self.value_embed = nn.Embedding(vocab, dim), nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList([Layer(dim, heads) for _ in range(layers)])
        self.lm_head = nn.Linear(dim, vocab, bias=False)
        self.lm_head.weight.data.zero_()
        self.skip = nn.Parameter(torch.ones(layers // 2))

    def forward(self, idx, target):
        x = x0 = norm(self.embed(idx))
        ve = self.value_embed(idx)
        skips, n = [], len(self.blocks) // 2
        for i, block in enumerate(self.blocks):
            if i >= n:
                x = x + self.skip[i - n] * skips.pop()
            x = block(x, ve, x0)
            if i < n:
                skips.append(x)
        logits = self.lm_head(norm(x)).float()
        logits = 15 * logits * torch.rsqrt(logits.square() + 225)
        return F.cross_entropy(logits.view(-1, logits.size(-1)), target.view(-1))


rank = int(os.environ.get("RANK", 0))
torch.manual_seed(42 + rank)
model = GPT(50304, 8, 512, 8).cuda()
for m in model.modules():
    if isinstance(m, nn.Embedding):
        m.bfloat16()
matrices = [p for n, p in model.blocks.named_parameters() if p.ndim >= 2]
scalars = [p for p in model.parameters() if p.ndim < 2]
adam = torch.optim.Adam(
    [dict(params=[model.lm_head.weight], lr=0.2), dict(params=[*model.embed.parameters(), *model.value_embed.parameters()], lr=0.6), dict(params=scalars, lr=0.04)],
    betas=(0.8, 0.95), eps=1e-10, fused=True,
)  # fmt: skip
optimizers = [adam, Muon(matrices)]
for opt in optimizers:
    for group in opt.param_groups:
        group["initial_lr"] = group["lr"]
data = torch.randint(0, 50257, (1 << 20,), dtype=torch.int32)
t0 = time.perf_counter()
for step in range(12):
    i = torch.randint(0, len(data) - 1025, (8,)).tolist()
    x = torch.stack([data[j : j + 1024] for j in i]).cuda(non_blocking=True).long()
    y = torch.stack([data[j + 1 : j + 1025] for j in i]).cuda(non_blocking=True).long()
    with torch.autocast("cuda", torch.bfloat16):
        loss = model(x, y)
    loss.backward()
    for opt in optimizers:
        for group in opt.param_groups:
            group["lr"] = group["initial_lr"] * (1 - step / 12)
        opt.step()
    model.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    print(
        f"step:{step} loss:{loss.item():.4f} time:{1000 * (time.perf_counter() - t0):.0f}ms peak {torch.cuda.max_memory_allocated() // 1024 // 1024} MiB"
    )
