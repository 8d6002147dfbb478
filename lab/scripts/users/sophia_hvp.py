"""A second-order optimizer of one's own: Hutchinson's diagonal by Hessian-vector products, clipped updates, foreach."""

import math, torch
from torch import nn
import torch.nn.functional as F


class Sophia(torch.optim.Optimizer):
    def __init__(self, params, lr=2e-4, betas=(0.96, 0.99), rho=0.04, weight_decay=0.1):
        super().__init__(params, dict(lr=lr, betas=betas, rho=rho, weight_decay=weight_decay))

    @torch.no_grad()
    def update_hessian(self, traces):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["m"], state["h"], state["step"] = torch.zeros_like(p), torch.zeros_like(p), 0
                state["h"].mul_(group["betas"][1]).add_(traces[p], alpha=1 - group["betas"][1])

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            for p in params:
                if not self.state[p]:
                    self.state[p].update(m=torch.zeros_like(p), h=torch.zeros_like(p), step=0)
            m, h, g = [self.state[p]["m"] for p in params], [self.state[p]["h"] for p in params], [p.grad for p in params]
            torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_lerp_(m, g, 1 - group["betas"][0])
            ratio = torch._foreach_div(torch._foreach_abs(m), torch._foreach_add(torch._foreach_mul(h, group["rho"]), 1e-15))
            torch._foreach_clamp_max_(ratio, 1.0)
            torch._foreach_addcmul_(params, torch._foreach_sign(m), ratio, value=-group["lr"])


class Block(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.n1, self.n2, self.heads = nn.RMSNorm(d), nn.RMSNorm(d), heads
        self.qkv, self.o, self.w = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False), nn.Linear(d, 8 * d // 3 * 2, bias=False)
        self.out = nn.Linear(8 * d // 3, d, bias=False)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        a = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).masked_fill(torch.ones(t, t, device=x.device).triu(1).bool(), -1e9)
        x = x + self.o((a.softmax(-1) @ v).transpose(1, 2).reshape(b, t, d))
        a, g = self.w(self.n2(x)).chunk(2, -1)
        return x + self.out(F.silu(a) * g)


torch.manual_seed(1)
d, vocab = 512, 8000
embed, head = nn.Embedding(vocab, d), nn.Linear(d, vocab, bias=False)
net = nn.Sequential(embed, *[Block(d, 8) for _ in range(5)], nn.RMSNorm(d), head).cuda()
head.weight = embed.weight
opt = Sophia(net.parameters())
params = list(net.parameters())
for step in range(6):
    ids = torch.randint(vocab, (8, 257), device="cuda")
    if step % 3 == 0:
        loss = F.cross_entropy(net(ids[:4, :-1]).flatten(0, 1).float(), ids[:4, 1:].flatten())
        grads = torch.autograd.grad(loss, params, create_graph=True)
        zs = [torch.randint_like(p, 2) * 2 - 1 for p in params]
        hvs = torch.autograd.grad(grads, params, zs)
        opt.update_hessian({p: z * hv for p, z, hv in zip(params, zs, hvs)})
        del grads, hvs, zs, loss
    loss = F.cross_entropy(net(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(params, 1.0)
    opt.step()
    print(step, loss.item())
