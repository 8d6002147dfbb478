"""Efficiencies of one GPU applied to another."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import median

import pytest

from trainatomy.catalog.calibrations import from_text, shipped
from trainatomy.catalog.files import read_yaml
from trainatomy.catalog.gpus import find_gpu, gpus
from trainatomy.operators.cost.kernel import KernelWork, chip_of
from trainatomy.timing.cost_model import (
    CostModel,
    cost_model_from,
    cost_model_of,
    kernel_cost,
    kernel_work,
)
from trainatomy.timing.efficiency import EfficiencyPoint, FamilyPoints, point_microseconds
from trainatomy.timing.extrapolation import SAME_GPU, attainable_share, extrapolation_between

H200 = find_gpu("h200")
ADD = "aten::add(f32[{n}],f32[{n}])->f32[{n}]"
PRODUCT = "aten::mm(f32[4096,4096],f32[4096,4096])->f32[4096,4096]"
HALF = "aten::mm(f16[4096,4096],f16[4096,4096])->f16[4096,4096]"


def seconds(text: str, name: str, *, tf32: bool = False) -> float:
    return kernel_cost(from_text(text), cost_model_of(find_gpu(name), tf32=tf32)).seconds


def test_the_calibrated_gpu_uses_its_own_efficiencies():
    assert cost_model_of(H200).extrapolation is SAME_GPU
    assert cost_model_of(find_gpu("h100-pcie")).extrapolation is not SAME_GPU


def test_extrapolating_to_the_same_gpu_changes_nothing():
    extrapolation, chip = extrapolation_between(H200, H200), chip_of(H200, tf32=False)
    product = KernelWork("matmul.half.plain.nn.alone", (), 1e12, "fp16", 1e8, 1, 2e-3)
    assert extrapolation.arithmetic_seconds(product, 2e-3, chip) == pytest.approx(2e-3)
    for share in (0.2, 0.6, 0.9, 1.3):
        moving = KernelWork("traffic.plain.32.add", (5.0,), 0.0, "fp32", 2e9, 1)
        taken = moving.bytes / (chip.bandwidth * share)
        least = (moving.bytes - chip.l2_bytes) / (chip.bandwidth * extrapolation.share)
        assert extrapolation.traffic_seconds(moving, taken, chip) == pytest.approx(max(taken, least))


@pytest.mark.parametrize("name", ["v100-16gb", "rtx-3090", "rtx-4090", "a100-40gb", "t4", "h100-pcie"])
def test_only_cached_data_moves_faster_than_memory(name):
    numbers = 2**28
    moved = 3 * 4 * numbers - (find_gpu(name).l2_bytes or 0)
    top = read_yaml("efficiency.yaml")["traffic"]["bandwidth"]
    taken = seconds(ADD.format(n=numbers), name)
    assert taken >= 0.999 * moved / (find_gpu(name).bandwidth_bytes_per_second * top)
    assert taken <= 1.4 * moved / (find_gpu(name).bandwidth_bytes_per_second * top)


def test_multiprocessor_overhead_matters_less_if_memory_is_slow():
    """A V100's memory is slower relative to its multiprocessors, so kernels reach a higher share of its bandwidth."""
    v100 = find_gpu("v100-16gb")
    work = KernelWork("traffic.transposed.16.clone", (5.0,), 0.0, "fp32", 1e9, 1)
    there = work.bytes / (H200.bandwidth_bytes_per_second / 3)
    scaled = there * H200.bandwidth_bytes_per_second / v100.bandwidth_bytes_per_second
    here = extrapolation_between(H200, v100).traffic_seconds(work, scaled, chip_of(v100, tf32=False))
    assert scaled > here > work.bytes / (v100.bandwidth_bytes_per_second * 0.9)


def test_products_attain_the_published_share():
    attained = read_yaml("efficiency.yaml")["attained"]
    for text, kind in ((PRODUCT, "fp32"), (HALF, "half")):
        rate = {"fp32": "fp32", "half": "fp16"}[kind]
        for name in ("v100-16gb", "a100-40gb", "rtx-3090", "rtx-4090"):
            reached = 2 * 4096**3 / seconds(text, name)
            best = attained[name][kind] * find_gpu(name).rates[rate]
            assert 0.75 * best < reached < 1.08 * best, (name, kind)


def test_tf32_defaults_to_the_share_of_16_bits():
    extrapolation = extrapolation_between(H200, find_gpu("a100-40gb"))
    attained = read_yaml("efficiency.yaml")["attained"]
    assert "tf32" not in attained["a100-40gb"]
    assert extrapolation.products["tf32"] == pytest.approx(attained["h200"]["tf32"] / attained["a100-40gb"]["half"])


@pytest.mark.parametrize(("rate", "kind"), [("bf16", "half"), ("tf32", "tf32"), ("fp32", "fp32")])
def test_grouped_products_and_convolutions_are_scaled_by_their_precision(rate: str, kind: str) -> None:
    target = find_gpu("rtx-4090")
    extrapolation = extrapolation_between(H200, target)
    for family in ("grouped.kernel.nn", "convolution.forward.spatial.last"):
        work = KernelWork(family, (), 1e12, rate, 1e6, 1, 1e-2)
        taken = extrapolation.arithmetic_seconds(work, 1e-2, chip_of(target, tf32=True))
        assert taken == pytest.approx(1e-2 * extrapolation.products[kind])
    assert extrapolation.products["tf32"] < extrapolation.products["fp32"]


def test_older_kernels_lose_nothing_on_older_gpus():
    product = KernelWork("matmul.half_odd.plain.nn.alone", (), 1e12, "fp16", 1e6, 1, 1e-2)
    a100, h100 = find_gpu("a100-80gb"), find_gpu("h100-sxm")
    share = read_yaml("efficiency.yaml")["hopper"]["older_instructions"]
    for target, gain in ((a100, share), (find_gpu("rtx-5090"), share), (h100, 1.0)):
        extrapolation = extrapolation_between(H200, target)
        taken = extrapolation.arithmetic_seconds(product, 1e-2, chip_of(target, tf32=False))
        assert taken == pytest.approx(1e-2 * gain * extrapolation.products["half"])


def test_attention_takes_its_arithmetic_and_the_multiprocessors_own_time():
    """By hand: an H200 needs 1.6 ms at the share of its peak for kernels of Ampere, and the other 0.4 ms of 2."""
    h200, rtx3090 = chip_of(H200, tf32=False), chip_of(find_gpu("rtx-3090"), tf32=False)
    share = read_yaml("efficiency.yaml")["hopper"]["older_instructions"]
    flop = 1.6e-3 * h200.rates["fp16"] * share
    family = "attention.half.forward.flash.full"
    attention = KernelWork(family, (), flop, "fp16", 1e6, 1, 2e-3, instructions=(flop, "fp16"))
    scaled = 2e-3 * h200.rates["fp16"] / rtx3090.rates["fp16"]
    taken = extrapolation_between(H200, find_gpu("rtx-3090")).arithmetic_seconds(attention, scaled, rtx3090)
    assert taken == pytest.approx(flop / (71e12 * 1.10) + 0.4e-3 * h200.issue_rate / rtx3090.issue_rate)
    same = extrapolation_between(H200, H200).arithmetic_seconds(attention, 2e-3, h200)
    assert same == pytest.approx(2e-3)


def test_fused_attention_comes_near_what_was_published_of_a_geforce():
    """187 of 209.5 TFLOP/s in bf16 on an RTX 5090 (https://gau-nernst.github.io/fa-5090/); 64 by the H200's share."""
    q, k = "bf16[1,8,4096,128]", "bf16[1,8,8192,128]"
    taken = seconds(f"aten::_scaled_dot_product_flash_attention({q},{k},{k})->{q},f32[1,8,4096]", "rtx-5090")
    assert 120e12 < 4 * 8 * 4096 * 8192 * 128 / taken < 209.5e12


def eager_seconds(name: str, kind: str) -> float:
    """Return the time of attention of 8 samples, 16 heads, 1024 tokens and heads of 64 by products and a softmax."""
    heads, scores, turned = (f"{kind}[128,1024,64]", f"{kind}[128,1024,1024]", f"{kind}[128,64,1024]")
    calls = (
        f"aten::bmm({heads},{turned})->{scores}",
        f"aten::mul({scores},{kind}[])->{scores}",
        f"aten::_softmax({scores})->{scores};dim=-1",
        f"aten::bmm({scores},{heads})->{heads}",
    )
    return sum(seconds(call, name) for call in calls)


@pytest.mark.parametrize("one", [one for one in gpus() if one.capability >= (7, 0)], ids=lambda one: one.id)
def test_fused_attention_is_no_slower_than_eager(one):
    """An H20 is left out in fp32: three products of TF32 on its tensor cores take longer than one of fp32.

    Where tensor cores are no faster in TF32 than others in fp32, they take about as long as eager attention.
    """
    slow_cores = one.rates.get("tf32") == one.rates["fp32"]
    for kind in ("f16", "f32")[: 1 if one.id.startswith("h20-") or one.id == "h20" else 2]:
        q = f"{kind}[8,16,1024,64]"
        fused = f"aten::_scaled_dot_product_efficient_attention({q}*3)->{q},f32[8,16,1024]"
        assert seconds(fused, one.id) < eager_seconds(one.id, kind) * (1.1 if slow_cores else 1), kind


@pytest.mark.parametrize("one", gpus(), ids=lambda one: one.id)
def test_tf32_is_no_slower_than_fp32(one):
    for shape in ("8192,768,768", "2048,1024,1024", "8192,50257,768"):
        m, n, k = shape.split(",")
        product = f"aten::mm(f32[{m},{k}],f32[{k},{n}])->f32[{m},{n}]"
        assert seconds(product, one.id, tf32=True) <= seconds(product, one.id) * (1 + 1e-9), shape


def test_without_tensor_cores_attention_in_16_bits_takes_as_long_as_in_fp32():
    taken = [
        seconds(f"aten::_scaled_dot_product_efficient_attention({q}*3)->{q},f32[256,1,512]", "p100-16gb")
        for q in ("f16[256,1,512,64]", "f32[256,1,512,64]")
    ]
    assert taken[0] == pytest.approx(taken[1], rel=0.05)


def test_shares_that_are_not_published_are_those_of_a_relative():
    facts = read_yaml("efficiency.yaml")
    assert attainable_share(find_gpu("rtx-4060"), "fp16") == facts["attained"]["rtx-4070-ti-super"]["half"]
    assert attainable_share(find_gpu("rtx-a6000"), "fp32") == facts["attained"]["rtx-3090"]["fp32"]
    known = {one.id for one in gpus()}
    assert {*facts["attained_like"], *facts["attained_like"].values()} <= known


@pytest.mark.parametrize("size", [8192, 16384, 32768])
def test_no_product_is_faster_than_the_fastest_published(size):
    """On the calibrated GPU, efficiencies that are interpolated for large products exceed all that it measured."""
    product = f"aten::mm(bf16[{size},{size}],bf16[{size},{size}|1,{size}])->bf16[{size},{size}]"
    a100, share = find_gpu("a100-80gb"), read_yaml("efficiency.yaml")["attained"]["a100-80gb"]["half"]
    rate = 2 * size**3 / seconds(product, "a100-80gb")
    assert 0.95 * share < rate / a100.rates["bf16"] <= share * (1 + 1e-9)


def test_attained_shares_are_of_known_gpus():
    known = {one.id for one in gpus()}
    shares = {name: one for name, one in read_yaml("efficiency.yaml")["attained"].items() if name != "source"}
    assert set(shares) <= known
    assert all(0.3 < share < 1.2 for one in shares.values() for share in one.values())


@pytest.mark.parametrize("one", [one for one in gpus() if "tf32" not in one.rates], ids=lambda one: one.id)
def test_fp32_without_tensor_cores_stays_below_its_peak(one):
    q = "f32[1,32,4096,128]"
    for text in (
        f"aten::_scaled_dot_product_efficient_attention({q}*3)->{q},f32[1,32,4096]",
        "aten::convolution(bf16[32,3,224,224],bf16[1024,3,14,14])->bf16[32,1024,16,16];stride=[14, 14]",
    ):
        cost = kernel_cost(from_text(text), cost_model_of(one))
        assert cost.seconds > cost.flop_seconds > 0


def test_a_calibration_predicts_what_another_gpu_measured():
    """The H200 and the H100 differ only in memory: extrapolating one calibration predicts the other."""
    h100 = find_gpu("h100-sxm")
    extrapolated = {tf32: cost_model_from(h100, shipped()["h200"], tf32=tf32) for tf32 in (False, True)}
    off = sorted(
        abs(kernel_cost(point.call, extrapolated[point.tf32]).seconds / (point_microseconds(point) * 1e-6) - 1)
        for point in shipped()["h100-sxm"].points
        if point.hot > 10
    )
    assert len(off) > 1000
    assert median(off) < 0.05
    assert off[int(0.9 * len(off))] < 0.22


def of_points(name: str, other: str, counts: tuple[int, int], families: tuple[str, str]) -> CostModel:
    """Return the model of a GPU with points of its own, and of another calibration, in the families named."""
    models = []
    for one, count, family in zip((name, other), counts, families, strict=True):
        points = FamilyPoints((EfficiencyPoint((10.0,), math.log(len(models) + 2), 1),) * count)
        known = {".".join(family.split(".")[:length]): points for length in range(1, family.count(".") + 2)}
        models.append(CostModel(chip_of(find_gpu(one), tf32=False), 1e-6, known))
    return replace(models[0], other=models[1])


@pytest.mark.parametrize(
    ("counts", "families", "ratio"),
    [
        ((5, 50), ("a.b", "a.b.c"), 3),  # the other knows the family itself
        ((5, 15), ("a.b.c", "a.b.c"), 2),
        ((5, 16), ("a.b.c", "a.b.c"), 3),  # many times as many points
        ((5, 2), ("a.b", "a.b.c"), 2),  # too few
        ((5, 50), ("a.b.c", "a.b"), 2),
    ],
)
def test_another_calibration_stands_in_for_families_that_it_knows_better(counts, families, ratio):
    model = of_points("h100-sxm", "h200", counts, families)
    assert model.efficiency(KernelWork("a.b.c", (10.0,), 1e9, "fp16", 1e6, 1, 1e-4)) == pytest.approx(ratio)


def test_a_calibrated_gpu_takes_what_it_lacks_from_the_nearest_one():
    model = cost_model_of(find_gpu("h100-sxm"))
    assert model.calibrated and model.other is not None
    assert model.other.source.startswith("calibration of NVIDIA H200")
    assert model.other.extrapolation is not SAME_GPU and model.other.chip == model.chip


def test_slow_loading_does_not_depend_on_memory():
    """The H100's multiprocessors are those of the H200; its memory is 0.7 times as fast."""
    misaligned = "aten::mm(f16[262144,65],f16[65,65])->f16[262144,65]"
    aligned = "aten::mm(f16[262144,64],f16[64,64])->f16[262144,64]"
    h100, h200 = (chip_of(find_gpu(name), tf32=None) for name in ("h100-sxm", "h200"))
    ratios = [
        kernel_work(from_text(text), h100).seconds / kernel_work(from_text(text), h200).seconds
        for text in (misaligned, aligned)
    ]
    assert ratios[0] < 1.1 and ratios[1] > 1.25
