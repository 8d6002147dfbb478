"""Train a small network by Lightning's Trainer, which is told to let cuDNN try its algorithms."""

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        layers, width = [], 3
        for wider in (64, 128, 256):
            layers += [nn.Conv2d(width, wider, 3, 2, 1), nn.BatchNorm2d(wider), nn.ReLU(True)]
            layers += [nn.Conv2d(wider, wider, 5, 1, 2), nn.BatchNorm2d(wider), nn.ReLU(True)]
            width = wider
        self.network = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))

    def training_step(self, batch, index):
        return nn.functional.cross_entropy(self.network(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


data = TensorDataset(torch.randn(256, 3, 64, 64), torch.randint(0, 10, (256,)))
trainer = L.Trainer(
    benchmark=True, accelerator="gpu", devices=1, max_epochs=1, logger=False, enable_checkpointing=False,
    enable_progress_bar=False,
)  # fmt: skip
trainer.fit(Classifier(), DataLoader(data, batch_size=32))
