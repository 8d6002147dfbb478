import torch, torch.nn as nn, torch.nn.functional as F


class CRN(nn.Module):
    def __init__(self, n_fft=512, hop=128):
        super().__init__()
        self.n_fft, self.hop = n_fft, hop
        self.lstm = nn.LSTM(n_fft // 2 + 1, 400, 2, batch_first=True)
        self.mask = nn.Sequential(nn.Linear(400, n_fft // 2 + 1), nn.Sigmoid())

    def forward(self, wave):
        window = torch.hann_window(self.n_fft, device=wave.device)
        spec = torch.stft(wave, self.n_fft, self.hop, window=window, return_complex=True)
        mag, phase = spec.abs(), spec.angle()
        h, _ = self.lstm(mag.transpose(1, 2))
        m = self.mask(h).transpose(1, 2)
        est = torch.polar(mag * m, phase)
        return torch.istft(est, self.n_fft, self.hop, window=window, length=wave.shape[-1]), m


def si_snr(est, ref, eps=1e-8):
    est, ref = est - est.mean(-1, keepdim=True), ref - ref.mean(-1, keepdim=True)
    proj = (est * ref).sum(-1, keepdim=True) * ref / (ref.pow(2).sum(-1, keepdim=True) + eps)
    noise = est - proj
    return 10 * torch.log10(proj.pow(2).sum(-1) / (noise.pow(2).sum(-1) + eps) + eps)


model = CRN().to("cuda")
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(6):
    clean = torch.randn(16, 48000, device="cuda")
    noisy = clean + 0.3 * torch.randn_like(clean)
    est, m = model(noisy)
    loss = -si_snr(est, clean).mean() + 0.1 * F.l1_loss(est, clean)
    opt.zero_grad()
    loss.backward()
    grad = nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    opt.step()
    print(step, loss.item(), grad.item())
