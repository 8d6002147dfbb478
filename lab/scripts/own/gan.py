"""Two convolutional networks with an optimizer each, trained in turns."""

import torch
from torch import nn


def block(width, out):
    return nn.Sequential(nn.Conv2d(width, out, 4, 2, 1, bias=False), nn.BatchNorm2d(out), nn.LeakyReLU(0.2))


def up(width, out):
    return nn.Sequential(nn.ConvTranspose2d(width, out, 4, 2, 1, bias=False), nn.BatchNorm2d(out), nn.ReLU(True))


critic = nn.Sequential(block(3, 64), block(64, 128), block(128, 256), nn.Flatten(), nn.Linear(256 * 64, 1)).cuda()
maker = nn.Sequential(
    nn.ConvTranspose2d(64, 256, 8), up(256, 128), up(128, 64), nn.ConvTranspose2d(64, 3, 4, 2, 1)
).cuda()
first = torch.optim.Adam(critic.parameters(), betas=(0.5, 0.999))
second = torch.optim.Adam(maker.parameters(), betas=(0.5, 0.999))
ones, zeros = torch.ones(128, 1, device="cuda"), torch.zeros(128, 1, device="cuda")
score = nn.BCEWithLogitsLoss()
for _ in range(100):
    real = torch.randn(128, 3, 64, 64).cuda()
    made = maker(torch.randn(128, 64, 1, 1, device="cuda"))
    first.zero_grad()
    (score(critic(real), ones) + score(critic(made.detach()), zeros)).backward()
    first.step()
    second.zero_grad()
    score(critic(made), ones).backward()
    second.step()
