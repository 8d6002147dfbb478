import torch
import torch.nn as nn
import torch.nn.functional as F


def index_points(points, idx):
    B = points.shape[0]
    view = list(idx.shape)
    view[1:] = [1] * (len(view) - 1)
    rep = list(idx.shape)
    rep[0] = 1
    batch = torch.arange(B, dtype=torch.long).to(points.device).view(view).repeat(rep)
    return points[batch, idx, :]


def farthest_point_sample(xyz, npoint):
    device = xyz.device
    B, N, C = xyz.shape
    centroids = torch.zeros(B, npoint, dtype=torch.long).to(device)
    distance = torch.ones(B, N).to(device) * 1e10
    farthest = torch.randint(0, N, (B,), dtype=torch.long).to(device)
    batch = torch.arange(B, dtype=torch.long).to(device)
    for i in range(npoint):
        centroids[:, i] = farthest
        centroid = xyz[batch, farthest, :].view(B, 1, 3)
        dist = torch.sum((xyz - centroid) ** 2, -1)
        mask = dist < distance
        distance[mask] = dist[mask]
        farthest = torch.max(distance, -1)[1]
    return centroids


def knn(x, k):
    inner = -2 * torch.matmul(x.transpose(2, 1), x)
    xx = torch.sum(x**2, dim=1, keepdim=True)
    return (-xx - inner - xx.transpose(2, 1)).topk(k=k, dim=-1)[1]


def graph_feature(x, k=20):
    b, c, n = x.size()
    idx = knn(x, k)
    idx = (idx + torch.arange(0, b, device=x.device).view(-1, 1, 1) * n).view(-1)
    x = x.transpose(2, 1).contiguous()
    feature = x.view(b * n, -1)[idx, :].view(b, n, k, c)
    x = x.view(b, n, 1, c).repeat(1, 1, k, 1)
    return torch.cat((feature - x, x), dim=3).permute(0, 3, 1, 2).contiguous()


class DGCNN(nn.Module):
    def __init__(self, k=20, classes=40):
        super().__init__()
        self.k = k
        conv = lambda i, o: nn.Sequential(nn.Conv2d(i, o, 1, bias=False), nn.BatchNorm2d(o), nn.LeakyReLU(0.2))
        self.c1, self.c2, self.c3, self.c4 = conv(6, 64), conv(128, 64), conv(128, 128), conv(256, 256)
        self.c5 = nn.Sequential(nn.Conv1d(512, 1024, 1, bias=False), nn.BatchNorm1d(1024), nn.LeakyReLU(0.2))
        self.head = nn.Sequential(
            nn.Linear(2048, 512, bias=False),
            nn.BatchNorm1d(512),
            nn.LeakyReLU(0.2),
            nn.Dropout(0.5),
            nn.Linear(512, classes),
        )

    def forward(self, x):
        outs = []
        for conv in (self.c1, self.c2, self.c3, self.c4):
            x = conv(graph_feature(x, self.k)).max(dim=-1, keepdim=False)[0]
            outs.append(x)
        x = self.c5(torch.cat(outs, dim=1))
        x = torch.cat((F.adaptive_max_pool1d(x, 1).flatten(1), F.adaptive_avg_pool1d(x, 1).flatten(1)), 1)
        return self.head(x)


def smooth_loss(pred, gold, eps=0.2):
    n = pred.size(1)
    one_hot = torch.zeros_like(pred).scatter(1, gold.view(-1, 1), 1)
    one_hot = one_hot * (1 - eps) + (1 - one_hot) * eps / (n - 1)
    return -(one_hot * F.log_softmax(pred, dim=1)).sum(dim=1).mean()


model = DGCNN().to("cuda")
opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 10, eta_min=1e-3)
for epoch in range(2):
    for it in range(4):
        cloud = torch.rand(16, 2048, 3).cuda()
        label = torch.randint(0, 40, (16,)).cuda()
        idx = farthest_point_sample(cloud, 1024 if it % 2 else 1024)
        data = index_points(cloud, idx).permute(0, 2, 1)
        opt.zero_grad()
        logits = model(data)
        loss = smooth_loss(logits, label)
        loss.backward()
        opt.step()
        preds = logits.max(dim=1)[1]
        print(loss.item(), (preds == label).sum().item() / 16)
    sched.step()
