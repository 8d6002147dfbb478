import math
import torch, torch.nn as nn, torch.nn.functional as F


def mel_filters(n_fft=1024, n_mels=80, sr=16000):
    f = torch.linspace(0, sr / 2, n_fft // 2 + 1)
    m = torch.linspace(0, 2595 * math.log10(1 + sr / 2 / 700), n_mels + 2)
    hz = 700 * (10 ** (m / 2595) - 1)
    slopes = hz[:, None] - f[None]
    d = hz[1:] - hz[:-1]
    return torch.clamp(torch.minimum(-slopes[:-2] / d[:-1, None], slopes[2:] / d[1:, None]), min=0)


class LogMel(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("window", torch.hann_window(1024))
        self.register_buffer("filters", mel_filters())

    def forward(self, wave):
        spec = torch.stft(wave, 1024, 256, window=self.window, return_complex=True)
        magnitudes = spec[..., :-1].abs() ** 2
        mel = self.filters @ magnitudes
        log = torch.clamp(mel, min=1e-10).log10()
        log = torch.maximum(log, log.amax(dim=(-2, -1), keepdim=True) - 8.0)
        return (log + 4.0) / 4.0


def spec_augment(x, time=40, freq=15):
    x = x.clone()
    b, f, t = x.shape
    for i in range(b):
        t0 = torch.randint(0, t - time, ()).item()
        f0 = torch.randint(0, f - freq, ()).item()
        x[i, f0 : f0 + freq] = 0
        x[i, :, t0 : t0 + time] = 0
    return x


class Net(nn.Module):
    def __init__(self, classes=35, d=256):
        super().__init__()
        self.mel = LogMel()
        self.conv = nn.Sequential(nn.Conv1d(80, d, 3, padding=1), nn.GELU(), nn.Conv1d(d, d, 3, 2, 1), nn.GELU())
        self.gru = nn.GRU(d, d, 2, batch_first=True, dropout=0.1, bidirectional=True)
        self.query = nn.Linear(2 * d, 1)
        self.head = nn.Linear(2 * d, classes)

    def forward(self, wave):
        with torch.no_grad():
            x = self.mel(wave)
            if self.training:
                x = spec_augment(x)
        h, _ = self.gru(self.conv(x).transpose(1, 2))
        a = torch.softmax(self.query(h), dim=1)
        return self.head((a * h).sum(1))


model = Net().cuda()
opt = torch.optim.AdamW(model.parameters(), 1e-3)
sched = torch.optim.lr_scheduler.OneCycleLR(opt, 1e-3, total_steps=10)
for i in range(10):
    wave, y = torch.randn(32, 16000 * 4).cuda(), torch.randint(0, 35, (32,)).cuda()
    loss = F.cross_entropy(model(wave), y, label_smoothing=0.1)
    opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_value_(model.parameters(), 1.0)
    opt.step()
    sched.step()
    print(i, loss.item(), sched.get_last_lr())
