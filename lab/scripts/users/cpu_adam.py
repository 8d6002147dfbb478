"""Master weights and Adam on the CPU: gradients are copied to pinned buffers as they appear, bfloat16 weights go back."""

import torch
from torch import nn
import torch.nn.functional as F


class Block(nn.Module):
    def __init__(self, d=1024, heads=16):
        super().__init__()
        self.h, self.n1, self.n2 = heads, nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.o, self.up, self.down = nn.Linear(d, 3 * d), nn.Linear(d, d), nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, self.h, -1).permute(2, 0, 3, 1, 4)
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.n2(x)), approximate="tanh"))


torch.manual_seed(0)
vocab, d = 16000, 1024
model = nn.Sequential(nn.Embedding(vocab, d), *[Block(d) for _ in range(6)], nn.LayerNorm(d), nn.Linear(d, vocab, bias=False))
model = model.to("cuda", torch.bfloat16)
pinned, masters = {}, []
stream = torch.cuda.Stream()


def offload(p):
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        pinned[p].copy_(p.grad, non_blocking=True)
        p.grad.record_stream(stream)
    p.grad = None


for p in model.parameters():
    pinned[p] = torch.empty(p.shape, dtype=p.dtype, pin_memory=True)
    masters.append(torch.zeros(p.shape, dtype=torch.float32))
    p.register_post_accumulate_grad_hook(offload)
opt = torch.optim.AdamW(masters, 1e-4)
for step in range(4):
    ids = torch.randint(vocab, (4, 513), device="cuda")
    loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1).float(), ids[:, 1:].flatten())
    loss.backward()
    torch.cuda.synchronize()
    for p, m in zip(model.parameters(), masters):
        m.grad = pinned[p].float()
    opt.step()
    opt.zero_grad()
    with torch.no_grad():
        for p, m in zip(model.parameters(), masters):
            p.add_(m.to("cuda", torch.bfloat16, non_blocking=True), alpha=0.0)
    print(step, loss.item())
