"""WaveNet: old weight_norm hooks, dilated causal convolutions, mixture of logistics, polyak average on the CPU."""

import torch
from torch import nn
from torch.nn.utils import weight_norm
import torch.nn.functional as F


class Layer(nn.Module):
    def __init__(self, c, skip, dilation, cond):
        super().__init__()
        self.pad = dilation
        self.conv, self.cond = weight_norm(nn.Conv1d(c, 2 * c, 2, dilation=dilation)), weight_norm(nn.Conv1d(cond, 2 * c, 1, bias=False))
        self.res, self.skip = weight_norm(nn.Conv1d(c, c, 1)), weight_norm(nn.Conv1d(c, skip, 1))

    def forward(self, x, mel):
        a, b = (self.conv(F.pad(x, (self.pad, 0))) + self.cond(mel)).chunk(2, 1)
        h = torch.tanh(a) * torch.sigmoid(b)
        return (x + self.res(h)) * 0.5**0.5, self.skip(h)


class WaveNet(nn.Module):
    def __init__(self, c=96, skip=96, layers=18, cond=80, mixtures=10):
        super().__init__()
        self.first = weight_norm(nn.Conv1d(1, c, 1))
        self.layers = nn.ModuleList(Layer(c, skip, 2 ** (n % 9), cond) for n in range(layers))
        self.last = nn.Sequential(nn.ReLU(True), weight_norm(nn.Conv1d(skip, skip, 1)), nn.ReLU(True), weight_norm(nn.Conv1d(skip, 3 * mixtures, 1)))

    def forward(self, x, mel):
        x, total = self.first(x), 0
        for layer in self.layers:
            x, s = layer(x, mel)
            total = total + s
        return self.last(total * len(self.layers) ** -0.5)


def mol(out, y, bits=65536):
    logit, mean, scale = out.transpose(1, 2).chunk(3, -1)
    scale = scale.clamp(min=-14)
    y = y.transpose(1, 2).expand_as(mean)
    inv = torch.exp(-scale)
    plus, minus = inv * (y - mean + 1 / bits), inv * (y - mean - 1 / bits)
    delta = torch.sigmoid(plus) - torch.sigmoid(minus)
    mid = inv * (y - mean)
    logp = torch.where(delta > 1e-5, delta.clamp(min=1e-12).log(), mid - scale - 2 * F.softplus(mid) - 10.4)
    logp = torch.where(y < -0.999, plus - F.softplus(plus), torch.where(y > 0.999, -F.softplus(minus), logp))
    return -torch.logsumexp(logp + F.log_softmax(logit, -1), -1).mean()


model = WaveNet().cuda()
opt = torch.optim.Adam(model.parameters(), 1e-3)
average = {n: p.detach().cpu().clone() for n, p in model.named_parameters()}
for step in range(4):
    x, mel = torch.rand(4, 1, 6001, device="cuda") * 2 - 1, torch.randn(4, 80, 6000, device="cuda")
    loss = mol(model(x[..., :-1], mel), x[..., 1:])
    opt.zero_grad()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
    for n, p in model.named_parameters():
        average[n].mul_(0.999).add_(p.detach().cpu(), alpha=0.001)
    print(step, loss.item(), float(norm))
