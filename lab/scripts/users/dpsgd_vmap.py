"""Differentially private SGD with per-sample gradients of torch.func."""

import torch, torch.nn as nn, torch.nn.functional as F
from torch.func import functional_call, grad, vmap, grad_and_value


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 32, 3, 1), nn.Conv2d(32, 64, 3, 1)
        self.fc1, self.fc2 = nn.Linear(9216, 128), nn.Linear(128, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv2(F.relu(self.conv1(x)))), 2)
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


model = Net().to("cuda")
opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def compute_loss(params, buffers, sample, target):
    predictions = functional_call(model, (params, buffers), (sample.unsqueeze(0),))
    return F.cross_entropy(predictions, target.unsqueeze(0))


ft_compute_grad = vmap(grad_and_value(compute_loss), in_dims=(None, None, 0, 0))
for step in range(5):
    data, target = torch.randn(64, 1, 28, 28, device="cuda"), torch.randint(10, (64,), device="cuda")
    params = {k: v.detach() for k, v in model.named_parameters()}
    buffers = {k: v.detach() for k, v in model.named_buffers()}
    grads, losses = ft_compute_grad(params, buffers, data, target)
    norms = torch.stack([g.flatten(1).norm(2, dim=1) for g in grads.values()], 1).norm(2, dim=1)
    factor = (1.0 / (norms + 1e-6)).clamp(max=1.0)
    opt.zero_grad()
    for name, p in model.named_parameters():
        clipped = torch.einsum("i,i...->...", factor, grads[name])
        p.grad = (clipped + torch.randn_like(clipped) * 0.8) / len(data)
    opt.step()
    print(step, losses.mean().item())
