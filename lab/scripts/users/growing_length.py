"""The context grows with the steps (a curriculum), batches shrink, z-loss, ALiBi, expandable segments."""

import os

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
import math, torch, torch.nn as nn, torch.nn.functional as F

torch.manual_seed(1)


class Block(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.h, self.n1, self.n2 = h, nn.LayerNorm(d, bias=False), nn.LayerNorm(d, bias=False)
        self.qkv, self.o, self.ff = nn.Linear(d, 3 * d), nn.Linear(d, d), nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(approximate="tanh"), nn.Linear(4 * d, d))

    def forward(self, x, bias):
        q, k, v = (t.unflatten(-1, (self.h, -1)).transpose(1, 2) for t in self.qkv(self.n1(x)).chunk(3, -1))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, attn_mask=bias.to(q.dtype)).transpose(1, 2).flatten(2))
        return x + self.ff(self.n2(x))


class LM(nn.Module):
    def __init__(self, vocab=24000, d=640, h=10, n=8):
        super().__init__()
        self.h, self.e = h, nn.Embedding(vocab, d)
        self.b, self.n = nn.ModuleList(Block(d, h) for _ in range(n)), nn.LayerNorm(d)
        self.register_buffer("slopes", 2 ** (-8 * torch.arange(1, h + 1) / h), persistent=False)

    def forward(self, ids):
        t = ids.size(1)
        pos = torch.arange(t, device=ids.device)
        far = (pos[None] - pos[:, None]).float()
        bias = (self.slopes[:, None, None] * far).masked_fill(far > 0, float("-inf")).unsqueeze(0)
        x = self.e(ids)
        for b in self.b:
            x = b(x, bias)
        return F.linear(self.n(x), self.e.weight)


net = LM().cuda()
opt = torch.optim.AdamW(net.parameters(), 6e-4, (0.9, 0.95), weight_decay=0.1, fused=True)
for step, (rows, length) in enumerate([(16, 256), (8, 512), (4, 1024), (2, 2048), (4, 1024)]):
    for micro in range(2):
        ids = torch.randint(24000, (rows, length + 1), device="cuda")
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits = net(ids[:, :-1])
        lse = logits.float().logsumexp(-1)
        nll = lse - logits.gather(-1, ids[:, 1:, None]).squeeze(-1).float()
        loss = (nll.mean() + 1e-4 * lse.square().mean()) / 2
        loss.backward()
    grad = sum(p.grad.float().square().sum() for p in net.parameters()).sqrt()
    for p in net.parameters():
        p.grad.mul_((1.0 / (grad + 1e-6)).clamp(max=1.0))
    opt.step()
    opt.zero_grad()
    print(step, length, f"{loss.item():.3f} {grad.item():.3f}")
