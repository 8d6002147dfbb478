import torch
from torch import nn


class Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx, i):
        result = i * torch.sigmoid(i)
        ctx.save_for_backward(i)
        return result

    @staticmethod
    def backward(ctx, grad_output):
        i = ctx.saved_tensors[0]
        s = torch.sigmoid(i)
        return grad_output * (s * (1 + i * (1 - s)))


class Quant(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.float32)
    def forward(ctx, w, bits):
        s = w.abs().max() / (2 ** (bits - 1) - 1)
        ctx.mask = w.abs() <= s * 127
        return (w / s).round() * s

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")
    def backward(ctx, g):
        return g * ctx.mask, None


class GRL(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, l):
        ctx.l = l
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return g.neg() * ctx.l, None


class QLinear(nn.Linear):
    def forward(self, x):
        return nn.functional.linear(x, Quant.apply(self.weight, 8), self.bias)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.ModuleList([QLinear(1024, 1024) for _ in range(6)])
        self.c = nn.Linear(1024, 31)
        self.d = nn.Linear(1024, 2)

    def forward(self, x):
        for l in self.f:
            x = Swish.apply(l(x))
        return self.c(x), self.d(GRL.apply(x, 0.3))


net = Net().cuda()
opt = torch.optim.NAdam(net.parameters(), lr=2e-4)
scaler = torch.amp.GradScaler()
for i in range(8):
    xs, ys, xt = torch.randn(512, 1024).cuda(), torch.randint(31, (512,)).cuda(), torch.randn(512, 1024).cuda()
    with torch.autocast("cuda", torch.float16):
        c, d1 = net(xs)
        _, d2 = net(xt)
        loss = nn.functional.cross_entropy(c, ys) + nn.functional.cross_entropy(
            torch.cat([d1, d2]), torch.cat([torch.zeros(512), torch.ones(512)]).long().cuda()
        )
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    print(i, loss.detach().cpu().numpy())
