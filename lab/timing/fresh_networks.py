"""Networks and batches of ``trainings.yaml`` that were drawn when the others had been measured."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

from torch import nn

sys.path.append(str(Path(__file__).resolve().parent))

from image_networks import torchvision_network
from random_batches import clicks_of, clips_of, pictures_of, texts_of
from table_networks import Recommender
from text_networks import Sequences

resnext_wide = torchvision_network("resnext101_64x4d")
resnet34_last = torchvision_network("resnet34", channels_last=True)
efficientnet_b1_last = torchvision_network("efficientnet_b1", channels_last=True)
squeezenet_large = torchvision_network("squeezenet1_0")
mobilenet_v3_small = torchvision_network("mobilenet_v3_small")
shufflenet_half = torchvision_network("shufflenet_v2_x0_5")
convnext_small = torchvision_network("convnext_small")
swin_s = torchvision_network("swin_s")
vit_b_32 = torchvision_network("vit_b_32")
alexnet = torchvision_network("alexnet")
deeplab_mobile = torchvision_network(
    "deeplabv3_mobilenet_v3_large", "segmentation", weights_backbone=None, num_classes=21
)
maxvit = torchvision_network("maxvit_t")
densenet201 = torchvision_network("densenet201")
resnet18 = torchvision_network("resnet18")
regnet_y_torchvision = torchvision_network("regnet_y_1_6gf")
efficientnet_b4 = torchvision_network("efficientnet_b4")
shufflenet_double = torchvision_network("shufflenet_v2_x2_0")
vgg11 = torchvision_network("vgg11")
deeplab_large = torchvision_network("deeplabv3_resnet101", "segmentation", weights_backbone=None, num_classes=21)
wide_lstm = partial(Sequences, nn.LSTM, 320, 800, num_layers=3)
bidirectional_gru = partial(Sequences, nn.GRU, 256, 384, 4000, num_layers=2, bidirectional=True)
deep_recommender = partial(Recommender, 400_000, 32, 16)

small_images = pictures_of(160, 1000)
short_clips = clips_of(8, 112)
sentences = texts_of(120, 4000)
long_clicks = clicks_of(16, 400_000, 12)
