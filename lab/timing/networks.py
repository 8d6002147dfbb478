"""Networks and batches of ``trainings.yaml`` beside transformers; the networks' classes are in files by family."""

from __future__ import annotations

import sys
from functools import cache, partial
from pathlib import Path

import torch
from torch import nn

sys.path.append(str(Path(__file__).resolve().parent))

from image_networks import Autoencoder, Classifier, Denoiser, Segmenter, Upscaler, Volumes, torchvision_network
from random_batches import Batch, clicks_of, clips_of, pictures_of, texts_of
from sound_networks import Recogniser, Separator, Waves
from table_networks import Many, Recommender, Towers
from text_networks import Sequences, Words

CLASSES = 1000

# -- images, videos, volumes -------------------------------------------------------------------------------------------

mobilenet_v2 = torchvision_network("mobilenet_v2")
mobilenet_v3 = torchvision_network("mobilenet_v3_large")
efficientnet_b0 = torchvision_network("efficientnet_b0")
efficientnet_b3_last = torchvision_network("efficientnet_b3", channels_last=True)
efficientnet_v2 = torchvision_network("efficientnet_v2_s")
densenet121 = torchvision_network("densenet121")
densenet169 = torchvision_network("densenet169")
resnext50 = torchvision_network("resnext50_32x4d")
resnext101 = torchvision_network("resnext101_32x8d")
shufflenet = torchvision_network("shufflenet_v2_x1_0")
mnasnet = torchvision_network("mnasnet1_0")
squeezenet = torchvision_network("squeezenet1_1")
vgg16 = torchvision_network("vgg16_bn")
googlenet = torchvision_network("googlenet", aux_logits=False, init_weights=False)
inception = torchvision_network("inception_v3", aux_logits=False, init_weights=False)
convnext = torchvision_network("convnext_tiny")
wide_resnet_last = torchvision_network("wide_resnet50_2", channels_last=True)
resnet101_last = torchvision_network("resnet101", channels_last=True)
swin = torchvision_network("swin_t")
vit = torchvision_network("vit_b_16")
deeplab = torchvision_network("deeplabv3_resnet50", "segmentation", weights_backbone=None, num_classes=21)
fcn = torchvision_network("fcn_resnet50", "segmentation", weights_backbone=None, num_classes=21)
lraspp = torchvision_network("lraspp_mobilenet_v3_large", "segmentation", weights_backbone=None, num_classes=21)
r3d = torchvision_network("r3d_18", "video", num_classes=400)
r2plus1d = torchvision_network("r2plus1d_18", "video", num_classes=400)
mc3 = torchvision_network("mc3_18", "video", num_classes=400)
s3d = torchvision_network("s3d", "video", num_classes=400)
denoiser = Denoiser
autoencoder = Autoencoder
upscaler = Upscaler


def segmenter() -> nn.Module:
    """Build the U-Net."""
    return Classifier(Segmenter())


def volumes() -> nn.Module:
    """Build the 3D U-Net."""
    return Classifier(Volumes())


images = pictures_of(224, CLASSES)
large_images = pictures_of(299, CLASSES)
scenes = pictures_of(256, 21, dense=True)
thumbnails = pictures_of(128, 21, dense=True)
clips = clips_of(16, 112)
large_clips = clips_of(16, 224)


@cache
def noisy(batch_size: int) -> Batch:
    """Draw random images of 64 x 64 and noise."""
    return {"pixel_values": torch.rand(batch_size, 3, 64, 64), "noise": torch.randn(batch_size, 3, 64, 64)}


@cache
def scans(batch_size: int) -> Batch:
    """Draw random volumes of 64 x 64 x 64 and a class for each place."""
    shape = (batch_size, 64, 64, 64)
    return {"pixel_values": torch.rand(batch_size, 1, 64, 64, 64), "labels": torch.randint(0, 4, shape)}


# -- sound -------------------------------------------------------------------------------------------------------------

separator = Separator
waves = Waves
recogniser = Recogniser


@cache
def sounds(batch_size: int) -> Batch:
    """Draw random sounds of two seconds at 8 kHz."""
    return {"input_values": torch.randn(batch_size, 1, 16000), "labels": torch.randn(batch_size, 1, 16000)}


@cache
def utterances(batch_size: int) -> Batch:
    """Draw random spectrograms of 400 frames and texts of 40 letters."""
    return {"features": torch.randn(batch_size, 1, 400, 160), "labels": torch.randint(1, 29, (batch_size, 40))}


# -- texts -------------------------------------------------------------------------------------------------------------

lstm_language_model = partial(Sequences, nn.LSTM, 650, 650, num_layers=2, dropout=0.5)
bidirectional_lstm = partial(Sequences, nn.LSTM, 200, 256, 2000, num_layers=1, bidirectional=True)
gru_language_model = partial(Sequences, nn.GRU, 256, 768, num_layers=3)
plain_recurrent = partial(Sequences, nn.RNN, 128, 512, 2000, num_layers=2)
words = Words
texts = texts_of(70, 2000)
long_texts = texts_of(256, 2000)


@cache
def bags_of_words(batch_size: int) -> Batch:
    """Draw random texts of 50 words."""
    return {"tokens": torch.randint(0, 500_000, (batch_size, 50)), "labels": torch.randint(0, 20, (batch_size,))}


# -- rows of numbers and categories ------------------------------------------------------------------------------------

recommender = Recommender
narrow_recommender = partial(Recommender, 20_000, 16, 12)
towers = Towers
many = Many
clicks = clicks_of(26, 100_000, 4)
narrow_clicks = clicks_of(12, 20_000, 1)


@cache
def purchases(batch_size: int) -> Batch:
    """Draw random users and items."""
    return {"users": torch.randint(0, 1_000_000, (batch_size,)), "items": torch.randint(0, 200_000, (batch_size,))}


@cache
def rows(batch_size: int) -> Batch:
    """Draw random rows of 96 numbers."""
    return {"x": torch.rand(batch_size, 96), "y": torch.rand(batch_size, 96)}
