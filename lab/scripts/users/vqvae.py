import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


class VectorQuantizerEMA(nn.Module):
    def __init__(self, num=512, dim=64, cost=0.25, decay=0.99, eps=1e-5):
        super().__init__()
        self.dim, self.num, self.cost, self.decay, self.eps = dim, num, cost, decay, eps
        self.embedding = nn.Embedding(num, dim)
        self.embedding.weight.data.normal_()
        self.register_buffer("_ema_cluster_size", torch.zeros(num))
        self._ema_w = nn.Parameter(torch.Tensor(num, dim))
        self._ema_w.data.normal_()

    def forward(self, inputs):
        inputs = inputs.permute(0, 2, 3, 1).contiguous()
        shape = inputs.shape
        flat = inputs.view(-1, self.dim)
        distances = (
            torch.sum(flat**2, dim=1, keepdim=True)
            + torch.sum(self.embedding.weight**2, dim=1)
            - 2 * torch.matmul(flat, self.embedding.weight.t())
        )
        idx = torch.argmin(distances, dim=1).unsqueeze(1)
        encodings = torch.zeros(idx.shape[0], self.num, device=inputs.device)
        encodings.scatter_(1, idx, 1)
        quantized = torch.matmul(encodings, self.embedding.weight).view(shape)
        if self.training:
            self._ema_cluster_size = self._ema_cluster_size * self.decay + (1 - self.decay) * torch.sum(encodings, 0)
            n = torch.sum(self._ema_cluster_size.data)
            self._ema_cluster_size = (self._ema_cluster_size + self.eps) / (n + self.num * self.eps) * n
            dw = torch.matmul(encodings.t(), flat)
            self._ema_w = nn.Parameter(self._ema_w * self.decay + (1 - self.decay) * dw)
            self.embedding.weight = nn.Parameter(self._ema_w / self._ema_cluster_size.unsqueeze(1))
        loss = self.cost * F.mse_loss(quantized.detach(), inputs)
        quantized = inputs + (quantized - inputs).detach()
        avg = torch.mean(encodings, dim=0)
        perplexity = torch.exp(-torch.sum(avg * torch.log(avg + 1e-10)))
        return loss, quantized.permute(0, 3, 1, 2).contiguous(), perplexity


class Residual(nn.Module):
    def __init__(self, c, r):
        super().__init__()
        self.block = nn.Sequential(
            nn.ReLU(True), nn.Conv2d(c, r, 3, 1, 1, bias=False), nn.ReLU(True), nn.Conv2d(r, c, 1, bias=False)
        )

    def forward(self, x):
        return x + self.block(x)


class Model(nn.Module):
    def __init__(self, h=128, r=32, d=64):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, h // 2, 4, 2, 1),
            nn.ReLU(),
            nn.Conv2d(h // 2, h, 4, 2, 1),
            nn.ReLU(),
            nn.Conv2d(h, h, 3, 1, 1),
            Residual(h, r),
            Residual(h, r),
            nn.ReLU(),
            nn.Conv2d(h, d, 1),
        )
        self.vq = VectorQuantizerEMA(dim=d)
        self.decoder = nn.Sequential(
            nn.Conv2d(d, h, 3, 1, 1),
            Residual(h, r),
            Residual(h, r),
            nn.ReLU(),
            nn.ConvTranspose2d(h, h // 2, 4, 2, 1),
            nn.ReLU(),
            nn.ConvTranspose2d(h // 2, 3, 4, 2, 1),
        )

    def forward(self, x):
        loss, q, perplexity = self.vq(self.encoder(x))
        return loss, self.decoder(q), perplexity


device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
data = TensorDataset(torch.rand(1024, 3, 32, 32) - 0.5)
data_variance = torch.var(data.tensors[0])
loader = DataLoader(data, batch_size=256, shuffle=True, pin_memory=True)
model = Model().to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, amsgrad=False)
model.train()
train_res_recon_error, train_res_perplexity = [], []
for i in range(10):
    (x,) = next(iter(loader))
    x = x.to(device)
    optimizer.zero_grad()
    vq_loss, recon, perplexity = model(x)
    recon_error = F.mse_loss(recon, x) / data_variance
    loss = recon_error + vq_loss
    loss.backward()
    optimizer.step()
    train_res_recon_error.append(recon_error.item())
    train_res_perplexity.append(perplexity.item())
    print(
        "%d recon %.3f perplexity %.3f"
        % (i + 1, sum(train_res_recon_error[-100:]) / len(train_res_recon_error), perplexity)
    )
