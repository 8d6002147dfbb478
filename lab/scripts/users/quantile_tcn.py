"""Forecasting: weight-normed dilated convolutions, instance normalisation, quantile loss, buckets of padded lengths."""

import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.data import DataLoader, Dataset, Sampler
import torch.nn.functional as F


class Series(Dataset):
    def __init__(self, n=400):
        g = torch.Generator().manual_seed(0)
        self.lengths = torch.randint(100, 700, (n,), generator=g).tolist()

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, i):
        return torch.randn(self.lengths[i], 8)


class Buckets(Sampler):
    def __init__(self, lengths, size):
        order = sorted(range(len(lengths)), key=lengths.__getitem__)
        self.batches = [order[i : i + size] for i in range(0, len(order) - size + 1, size)][::-1]

    def __iter__(self):
        return iter(self.batches)

    def __len__(self):
        return len(self.batches)


def collate(rows):
    lengths = torch.tensor([len(r) for r in rows])
    return nn.utils.rnn.pad_sequence(rows, batch_first=True), lengths


class TCN(nn.Module):
    def __init__(self, c=192, levels=7):
        super().__init__()
        self.inp = nn.Conv1d(8, c, 1)
        self.convs = nn.ModuleList(weight_norm(nn.Conv1d(c, 2 * c, 3, dilation=2**n)) for n in range(levels))
        self.mix = nn.ModuleList(nn.Conv1d(c, c, 1) for _ in range(levels))
        self.head = nn.Conv1d(c, 8 * 5, 1)

    def forward(self, x, mask):
        mean = (x * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True)
        std = (((x - mean) * mask).pow(2).sum(1, keepdim=True) / mask.sum(1, keepdim=True) + 1e-5).sqrt()
        h = self.inp(((x - mean) / std * mask).transpose(1, 2))
        for n, (conv, mix) in enumerate(zip(self.convs, self.mix)):
            a, b = conv(F.pad(h, (2 * 2**n, 0))).chunk(2, 1)
            h = h + F.dropout(mix(torch.tanh(a) * torch.sigmoid(b)), 0.1, self.training)
        return self.head(h).transpose(1, 2).unflatten(-1, (8, 5)) * std[..., None] + mean[..., None]


data = Series()
loader = DataLoader(data, batch_sampler=Buckets(data.lengths, 32), collate_fn=collate, num_workers=2, pin_memory=True)
levels = torch.tensor([0.1, 0.25, 0.5, 0.75, 0.9], device="cuda")
model = TCN().cuda()
opt = torch.optim.NAdam(model.parameters(), 1e-3)
for step, (x, lengths) in enumerate(loader):
    x, lengths = x.cuda(non_blocking=True), lengths.cuda(non_blocking=True)
    mask = (torch.arange(x.shape[1], device="cuda")[None] < lengths[:, None])[..., None].float()
    out = model(x, mask)[:, :-1]
    error = x[:, 1:, :, None] - out
    loss = (torch.maximum(levels * error, (levels - 1) * error).mean(-1) * mask[:, 1:]).sum() / mask[:, 1:].sum()
    loss.backward()
    opt.step()
    opt.zero_grad()
    if step % 5 == 0:
        print(step, loss.item(), x.shape)
