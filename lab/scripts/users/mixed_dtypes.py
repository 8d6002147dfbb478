"""Custom autograd functions, fp32 master weights by hand, bf16 compute, stochastic rounding, adaptive gradient clipping, SWA."""

import torch
from torch import nn
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn
import torch.nn.functional as F


class SquaredReLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x.clamp(min=0)
        ctx.save_for_backward(y)
        return y * y

    @staticmethod
    def backward(ctx, g):
        (y,) = ctx.saved_tensors
        return 2 * g * y


class RoundSTE(torch.autograd.Function):
    @staticmethod
    def forward(ctx, w):
        scale = w.abs().amax(1, keepdim=True) / 7
        return torch.round(w / scale).clamp(-8, 7) * scale

    @staticmethod
    def backward(ctx, g):
        return g


class QLinear(nn.Linear):
    def forward(self, x):
        return F.linear(x, RoundSTE.apply(self.weight), self.bias)


class Mixer(nn.Module):
    def __init__(self, d, t):
        super().__init__()
        self.a, self.b = nn.LayerNorm(d), nn.LayerNorm(d)
        self.t1, self.t2, self.c1, self.c2 = QLinear(t, 2 * t), QLinear(2 * t, t), QLinear(d, 4 * d), QLinear(4 * d, d)

    def forward(self, x):
        x = x + self.t2(SquaredReLU.apply(self.t1(self.a(x).transpose(1, 2)))).transpose(1, 2)
        return x + self.c2(SquaredReLU.apply(self.c1(self.b(x))))


stem = nn.Sequential(nn.Conv2d(3, 384, 8, 8), nn.BatchNorm2d(384), nn.Flatten(2)).cuda()
body = nn.Sequential(*[Mixer(384, 256) for _ in range(6)], nn.LayerNorm(384)).cuda()
head = nn.Linear(384, 100).cuda()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.body, self.head = stem, body, head

    def forward(self, x):
        return self.head(self.body(self.stem(x).transpose(1, 2)).mean(1))


net = Net().to(torch.bfloat16)
master = [p.detach().float().clone() for p in net.parameters()]
opt = torch.optim.Adagrad(master, 1e-3)
swa, swa_rate = AveragedModel(net, use_buffers=False), SWALR(opt, 5e-4)


def stochastic(x):
    bits = x.view(torch.int32)
    return (bits + torch.randint_like(bits, 1 << 16)).bitwise_and_(-65536).view(torch.float32).to(torch.bfloat16)


for step in range(5):
    x, y = torch.randn(48, 3, 128, 128, device="cuda", dtype=torch.bfloat16), torch.randint(100, (48,), device="cuda")
    loss = F.cross_entropy(net(x).float(), y)
    loss.backward()
    with torch.no_grad():
        for p, m in zip(net.parameters(), master):
            g = p.grad.float()
            limit = 0.01 * m.norm(dim=-1, keepdim=True).clamp(min=1e-3)
            m.grad = torch.where(g.norm(dim=-1, keepdim=True) > limit, g * limit / (g.norm(dim=-1, keepdim=True) + 1e-6), g)
            p.grad = None
    opt.step()
    opt.zero_grad()
    with torch.no_grad():
        for p, m in zip(net.parameters(), master):
            p.copy_(stochastic(m))
    if step >= 2:
        swa.update_parameters(net)
        swa_rate.step()
    print(step, loss.item())
update_bn([torch.randn(48, 3, 128, 128, dtype=torch.bfloat16) for _ in range(3)], swa, device="cuda")
