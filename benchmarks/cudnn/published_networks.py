"""Published networks of torchvision, timm, transformers and diffusers, with images of random sizes, on meta tensors.

timm and diffusers are needed beside the test requirements.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.append(str(Path(__file__).parent.parent / "accuracy"))

TORCHVISION = (
    "alexnet", "vgg11", "vgg11_bn", "vgg13", "vgg13_bn", "vgg16", "vgg16_bn", "vgg19", "vgg19_bn", "resnet18",
    "resnet34", "resnet50", "resnet101", "resnet152", "resnext50_32x4d", "resnext101_32x8d", "resnext101_64x4d",
    "wide_resnet50_2", "wide_resnet101_2", "densenet121", "densenet161", "densenet169", "densenet201",
    "inception_v3", "googlenet", "squeezenet1_0", "squeezenet1_1", "mobilenet_v2", "mobilenet_v3_large",
    "mobilenet_v3_small", "shufflenet_v2_x0_5", "shufflenet_v2_x1_0", "shufflenet_v2_x1_5", "shufflenet_v2_x2_0",
    "efficientnet_b0", "efficientnet_b1", "efficientnet_b2", "efficientnet_b3", "efficientnet_b4",
    "efficientnet_b5", "efficientnet_b7", "efficientnet_v2_s", "efficientnet_v2_m", "efficientnet_v2_l",
    "mnasnet0_5", "mnasnet0_75", "mnasnet1_0", "mnasnet1_3", "convnext_tiny", "convnext_small", "convnext_base",
    "convnext_large", "regnet_x_400mf", "regnet_x_800mf", "regnet_x_1_6gf", "regnet_x_3_2gf", "regnet_x_8gf",
    "regnet_x_16gf", "regnet_y_400mf", "regnet_y_800mf", "regnet_y_1_6gf", "regnet_y_3_2gf", "regnet_y_8gf",
    "regnet_y_16gf", "swin_t",
)  # fmt: skip
SEGMENTATION = (
    "deeplabv3_resnet50", "deeplabv3_resnet101", "deeplabv3_mobilenet_v3_large", "fcn_resnet50", "fcn_resnet101",
    "lraspp_mobilenet_v3_large",
)  # fmt: skip
VIDEO = ("r3d_18", "mc3_18", "r2plus1d_18", "s3d")
DETECTION = ("retinanet_resnet50_fpn", "fcos_resnet50_fpn", "ssd300_vgg16", "ssdlite320_mobilenet_v3_large")
TIMM = (
    "resnet10t", "resnet14t", "resnet26d", "resnet50d", "resnetv2_50", "resnetv2_50x1_bit", "seresnet50",
    "ecaresnet50d", "skresnet18", "res2net50_26w_4s", "resnest50d", "xception41", "xception", "inception_v4",
    "inception_resnet_v2", "dpn68", "dpn92", "dla34", "dla60", "hrnet_w18_small", "hrnet_w32", "regnetz_c16",
    "regnetv_040", "nfnet_f0", "dm_nfnet_f0", "cspresnet50", "cspdarknet53", "darknet53", "vovnet39a",
    "ese_vovnet39b", "selecsls42b", "repvgg_a2", "repvgg_b1g4", "mobileone_s1", "fastvit_t8", "ghostnet_100",
    "hardcorenas_a", "tinynet_a", "fbnetc_100", "lcnet_100", "mixnet_s", "mobilenetv1_100", "mobilenetv2_140",
    "mobilenetv3_large_100", "mobilenetv4_conv_medium", "efficientnet_lite0", "efficientnet_el",
    "tf_efficientnetv2_b0", "efficientnetv2_rw_t", "gernet_l", "convnextv2_nano", "convnextv2_tiny",
    "convnext_pico", "convmixer_768_32", "coatnet_0_rw_224", "maxvit_tiny_rw_224", "poolformer_s12", "pvt_v2_b1",
    "focalnet_tiny_srf", "efficientformer_l1", "edgenext_small", "mobilevit_s", "levit_128s", "densenetblur121d",
    "legacy_senet154", "legacy_xception", "rexnet_100", "semnasnet_100", "spnasnet_100", "visformer_small",
    "inception_next_tiny", "caformer_s18", "starnet_s1", "repvit_m1", "nextvit_small", "hgnet_tiny",
)  # fmt: skip
TRANSFORMERS = (
    "ResNetModel", "ConvNextModel", "ConvNextV2Model", "RegNetModel", "EfficientNetModel", "MobileNetV1Model",
    "MobileNetV2Model", "MobileViTModel", "SegformerModel", "PoolFormerModel", "BitModel", "ViTModel", "SwinModel",
    "CvtModel", "VanModel", "LevitModel", "PvtModel", "FocalNetModel", "DPTModel", "Dinov2Model", "SiglipVisionModel",
    "GLPNModel",
)  # fmt: skip
AUDIO = ("Wav2Vec2Model", "HubertModel", "WavLMModel", "Data2VecAudioModel", "UniSpeechSatModel", "DacModel")
FIXED = (
    "coatnet_0_rw_224",
    "maxvit_tiny_rw_224",
    "levit_128s",
    "efficientformer_l1",
    "visformer_small",
    "nextvit_small",
)
"""Networks of timm for images of 224 x 224 alone."""
BATCH = 2
"""Images at once: as few as batch norm can train."""


def side(chance: random.Random, least: int = 64, most: int = 512) -> int:
    """Draw the side of an image: a usual one, or any."""
    usual = [size for size in (96, 128, 160, 192, 224, 240, 256, 288, 299, 320, 384, 448, 512) if least <= size <= most]
    if usual and chance.random() < 0.4:
        return chance.choice(usual)
    return round(least * (most / least) ** chance.random())


def image(chance: random.Random, multiple: int = 1, least: int = 64, most: int = 512) -> tuple[int, int]:
    """Draw the size of an image, four of five times a square one."""
    rows = side(chance, least, most)
    columns = rows if chance.random() < 0.8 else side(chance, least, most)
    rows, columns = (max(least, round(size / multiple) * multiple) for size in (rows, columns))
    return rows, columns


Run = Callable[[random.Random], "tuple[list[int], Callable[[], Any]]"]
"""Draw a size, and return it with a call that runs the network at it."""


def of_images(network: nn.Module, multiple: int = 1, least: int = 64, most: int = 512) -> Run:
    """Return the runs of a network for images."""
    network = network.to("meta")

    def run(chance: random.Random) -> tuple[list[int], Callable[[], Any]]:
        rows, columns = image(chance, multiple, least, most)
        return [rows, columns], lambda: network(torch.empty(BATCH, 3, rows, columns, device="meta"))

    return run


def networks() -> Iterator[tuple[str, Callable[[], Run]]]:
    """Yield the networks by name, each with a call that builds it."""
    from torchvision_path import models

    vision = models()
    for name in TORCHVISION:
        yield name, partial(_of_torchvision, vision, name)
    for name in SEGMENTATION:
        yield name, partial(_of_segmentation, vision, name)
    for name in DETECTION:
        yield name, partial(_of_detection, vision, name)
    for name in VIDEO:
        yield name, partial(_of_clips, vision, name)
    yield from _of_timm()
    yield from _of_transformers()
    yield from _of_diffusers()


def _of_torchvision(vision: Any, name: str) -> Run:
    """Return the runs of a network of torchvision, at images that its strides leave something of."""
    heads = {"init_weights": False} if name in ("inception_v3", "googlenet") else {}
    least = 290 if name == "inception_v3" else 96 if name.startswith(("alexnet", "squeezenet")) else 64
    return of_images(getattr(vision, name)(weights=None, **heads), 1, least)


def _of_segmentation(vision: Any, name: str) -> Run:
    """Return the runs of a network that classifies pixels, with its second classifier."""
    auxiliary = {} if name.startswith("lraspp") else {"aux_loss": True}
    return of_images(getattr(vision.segmentation, name)(weights=None, weights_backbone=None, **auxiliary))


def _of_detection(vision: Any, name: str) -> Run:
    """Return the runs of the backbone and the head of a detector; what chooses boxes needs values."""
    network = getattr(vision.detection, name)(weights=None, weights_backbone=None)

    def run(chance: random.Random) -> tuple[list[int], Callable[[], Any]]:
        rows, columns = image(chance, 32, 256, 800)

        def call() -> None:
            features = network.backbone(torch.empty(BATCH, 3, rows, columns, device="meta"))
            network.head(list(features.values()))

        return [rows, columns], call

    return run


def _of_clips(vision: Any, name: str) -> Run:
    """Return the runs of a network for clips."""
    network = getattr(vision.video, name)(weights=None)

    def run(chance: random.Random) -> tuple[list[int], Callable[[], Any]]:
        frames, rows = chance.choice((8, 16, 16, 16, 24, 32)), side(chance, 96, 256)
        frames = max(frames, 16) if name == "s3d" else frames
        return [frames, rows, rows], lambda: network(torch.empty(BATCH, 3, frames, rows, rows, device="meta"))

    return run


def _of_timm() -> Iterator[tuple[str, Callable[[], Run]]]:
    import timm

    for name in TIMM:

        def built(name: str = name) -> Run:
            network = timm.create_model(name, pretrained=False)
            if name in FIXED:
                return of_images(network, 224, 224, 224)
            return of_images(network, 32, 64, 448)

        yield f"timm/{name}", built


def _of_transformers() -> Iterator[tuple[str, Callable[[], Run]]]:
    import transformers

    for name in TRANSFORMERS:

        def built(name: str = name) -> Run:
            kind = getattr(transformers, name)
            fixed = name in ("ViTModel", "SwinModel", "DPTModel", "Dinov2Model", "SiglipVisionModel", "LevitModel")
            network = kind(kind.config_class())
            size = getattr(network.config, "image_size", 224)
            return of_images(network, size, size, size) if fixed else of_images(network, 32, 64, 512)

        yield name, built
    for name in AUDIO:
        yield name, partial(_of_sound, transformers, name)
    yield "WhisperModel", lambda: _of_whisper(transformers)


def _of_sound(transformers: Any, name: str) -> Run:
    """Return the runs of a network for sound."""
    kind = getattr(transformers, name)
    network = kind(kind.config_class())
    rows = [1] if name == "DacModel" else []

    def run(chance: random.Random) -> tuple[list[int], Callable[[], Any]]:
        length = chance.choice((16_000, 48_000, 80_000, 160_000, 240_000, chance.randint(4_000, 320_000)))
        length -= length % 320 if rows else 0
        return [length], lambda: network(torch.empty(BATCH, *rows, length, device="meta"))

    return run


def _of_whisper(transformers: Any) -> Run:
    sizes = [(80, 384), (80, 512), (80, 768), (80, 1024), (80, 1280), (128, 1280)]
    networks = [
        transformers.models.whisper.modeling_whisper.WhisperEncoder(
            transformers.WhisperConfig(num_mel_bins=mels, d_model=width, encoder_layers=1, encoder_attention_heads=8)
        )
        for mels, width in sizes
    ]

    def run(chance: random.Random) -> tuple[list[int], Callable[[], Any]]:
        network = chance.choice(networks)
        return [3000], lambda: network(torch.empty(BATCH, network.config.num_mel_bins, 3000, device="meta"))

    return run


def _of_diffusers() -> Iterator[tuple[str, Callable[[], Run]]]:
    import diffusers

    def latents(network: Any, channels: int, least: int, most: int, width: int | None) -> Run:
        def run(chance: random.Random) -> tuple[list[int], Callable[[], Any]]:
            rows, columns = image(chance, 8 if width else 32, least, most)

            def call() -> Any:
                noise = torch.empty(BATCH, channels, rows, columns, device="meta")
                step = torch.zeros(BATCH, device="meta")
                return (
                    network(noise, step, torch.empty(BATCH, 77, width, device="meta"))
                    if width
                    else network(noise, step)
                )

            return [rows, columns], call

        return run

    yield (
        "UNet2DConditionModel",
        lambda: latents(diffusers.UNet2DConditionModel(sample_size=64, cross_attention_dim=768), 4, 16, 128, 768),
    )
    yield "UNet2DConditionModel, wide", lambda: latents(
        diffusers.UNet2DConditionModel(
            sample_size=128, cross_attention_dim=2048, block_out_channels=(320, 640, 1280),
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"), attention_head_dim=(5, 10, 20),
        ), 4, 16, 128, 2048,
    )  # fmt: skip
    small = {
        "block_out_channels": (128, 128, 256, 256, 512, 512),
        "down_block_types": ("DownBlock2D",) * 4 + ("AttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "AttnUpBlock2D") + ("UpBlock2D",) * 4,
    }
    yield "UNet2DModel", lambda: latents(diffusers.UNet2DModel(sample_size=64, **small), 3, 64, 256, None)
    autoencoder = {
        "block_out_channels": (128, 256, 512, 512), "down_block_types": ("DownEncoderBlock2D",) * 4,
        "up_block_types": ("UpDecoderBlock2D",) * 4, "layers_per_block": 2,
    }  # fmt: skip
    yield "AutoencoderKL", lambda: of_images(diffusers.AutoencoderKL(**autoencoder), 8, 64, 512)
    yield (
        "VQModel",
        lambda: of_images(diffusers.VQModel(**{**autoencoder, "block_out_channels": (64, 128, 128, 256)}), 8, 64, 256),
    )
