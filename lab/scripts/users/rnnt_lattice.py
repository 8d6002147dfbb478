"""Transducer: an LSTM encoder and predictor, the joint lattice, the forward algorithm over anti-diagonals in a Function."""

import torch
from torch import nn
import torch.nn.functional as F


class Lattice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, blank, label):
        b, T, U = blank.shape
        alpha = torch.full((b, T, U), -1e30, device=blank.device)
        alpha[:, 0, 0] = 0
        for n in range(1, T + U - 1):
            t = torch.arange(max(0, n - U + 1), min(T, n + 1), device=blank.device)
            u = n - t
            stay = torch.where(t > 0, alpha[:, (t - 1).clamp(min=0), u] + blank[:, (t - 1).clamp(min=0), u], -1e30)
            emit = torch.where(u > 0, alpha[:, t, (u - 1).clamp(min=0)] + label[:, t, (u - 1).clamp(min=0)], -1e30)
            alpha[:, t, u] = torch.logaddexp(stay, emit)
        beta = torch.full((b, T + 1, U + 1), -1e30, device=blank.device)
        beta[:, T - 1, U - 1] = blank[:, -1, -1]
        for n in range(T + U - 3, -1, -1):
            t = torch.arange(max(0, n - U + 1), min(T, n + 1), device=blank.device)
            u = n - t
            beta[:, t, u] = torch.logaddexp(beta[:, t + 1, u] + blank[:, t, u], beta[:, t, u + 1] + label[:, t, u])
        total = beta[:, 0, 0]
        ctx.save_for_backward(alpha, beta, blank, label, total)
        return -total

    @staticmethod
    def backward(ctx, grad):
        alpha, beta, blank, label, total = ctx.saved_tensors
        next_t = beta[:, 1:, :-1].clone()
        next_t[:, -1, -1] = 0
        gb = -torch.exp(alpha + blank + next_t - total[:, None, None]) * grad[:, None, None]
        gl = -torch.exp(alpha + label + beta[:, :-1, 1:] - total[:, None, None]) * grad[:, None, None]
        return gb, gl


class Transducer(nn.Module):
    def __init__(self, mel=80, d=384, vocab=128):
        super().__init__()
        self.sub = nn.Linear(mel * 4, d)
        self.enc, self.pre = nn.LSTM(d, d, 3, batch_first=True, dropout=0.1), nn.LSTM(128, d, batch_first=True)
        self.embed, self.e, self.p, self.out = nn.Embedding(vocab, 128), nn.Linear(d, 256), nn.Linear(d, 256), nn.Linear(256, vocab)

    def forward(self, x, y):
        b, t, f = x.shape
        h = self.enc(self.sub(x.view(b, t // 4, 4 * f)))[0]
        g = self.pre(self.embed(F.pad(y, (1, 0))))[0]
        logits = self.out(torch.tanh(self.e(h)[:, :, None] + self.p(g)[:, None])).log_softmax(-1)
        label = logits[:, :, :-1].gather(-1, y[:, None, :, None].expand(-1, logits.shape[1], -1, 1))[..., 0]
        return Lattice.apply(logits[..., 0].float(), F.pad(label.float(), (0, 1), value=-1e30)).mean() / y.shape[1]


model = Transducer().cuda()
opt = torch.optim.Adagrad(model.parameters(), 1e-2)
for step in range(4):
    x, y = torch.randn(12, 240, 80, device="cuda"), torch.randint(1, 128, (12, 24), device="cuda")
    loss = model(x, y)
    opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 5)
    opt.step()
    print(step, loss.item())
