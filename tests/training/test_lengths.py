"""The batches of an epoch whose samples differ in length."""

from statistics import fmean

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModel,
    BartConfig,
    BartForConditionalGeneration,
    GPT2Config,
    GPT2LMHeadModel,
    LlavaConfig,
    LlavaForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

from trainatomy.errors import WorkloadError
from trainatomy.training.batch import BatchesOfLengths, build_dataset
from trainatomy.training.lengths import BatchShape, LengthBatch, orders, sample_lengths
from trainatomy.workload.batching import Batching, batching_of
from trainatomy.workload.schema import Workload

GPT2 = GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=300, n_positions=64, bos_token_id=1, eos_token_id=2)


def described(data: dict, **train: object) -> Workload:
    settings = {"per_device_train_batch_size": 2, **train}
    return Workload.from_mapping({"model": {"id": "gpt2"}, "data": data, "train": settings})


@pytest.fixture(scope="module")
def gpt2() -> GPT2LMHeadModel:
    with torch.device("meta"):
        return GPT2LMHeadModel(GPT2)


@pytest.mark.parametrize(
    ("spec", "mean"),
    [
        ({"distribution": "lognormal", "mean": 5, "sigma": 0.5}, 168.2),
        ({"distribution": "normal", "mean": 200, "sigma": 10}, 199.5),
        ({"distribution": "uniform", "minimum": 100, "maximum": 300}, 200),
        ({"histogram": {100: 1, 200: 3}, "samples": 2000}, 175),
    ],
)
def test_drawn_lengths_have_the_mean_of_their_distribution(spec: dict, mean: float) -> None:
    lengths = sample_lengths(described({"lengths": spec}))
    assert len(lengths) == 2000
    assert fmean(lengths) == pytest.approx(mean, rel=0.04)
    assert lengths == sample_lengths(described({"lengths": spec}))
    assert lengths != sample_lengths(described({"lengths": {**spec, "seed": 1}}))


def test_lengths_are_truncated_and_padded() -> None:
    workload = described(
        {"lengths": [3, 9, 30, 5], "sequence_length": 20, "pad_to_multiple_of": 8}, train_sampling_strategy="sequential"
    )
    (order,) = orders(workload)
    assert sample_lengths(workload) == [3, 9, 20, 5]
    assert [batch.lengths for step in order.steps for batch in step] == [(3, 9), (20, 5)]
    assert [step[0].shape for step in order.steps] == [BatchShape(2, 16, True), BatchShape(2, 24, True)]
    assert [step[0].padded_tokens - step[0].tokens for step in order.steps] == [20, 23]


def test_each_sample_is_used_once_in_an_order_and_orders_differ() -> None:
    every = list(range(10, 50))
    workload = described({"lengths": dict.fromkeys(every, 1)}, gradient_accumulation_steps=4)
    found = orders(workload)
    assert len(found) == 8
    for order in found:
        assert len(order.steps) == 5
        assert sorted(length for step in order.steps for batch in step for length in batch.lengths) == every
    assert len({order.steps for order in found}) == 8


def test_grouping_by_length_puts_the_longest_first_and_wastes_less() -> None:
    lengths = {"distribution": "uniform", "minimum": 5, "maximum": 500, "samples": 400}

    def padding(strategy: str) -> int:
        order = orders(described({"lengths": lengths}, train_sampling_strategy=strategy))[0]
        if strategy == "group_by_length":
            assert order.steps[0][0].padded == max(sample_lengths(described({"lengths": lengths})))
        return sum(batch.padded_tokens - batch.tokens for step in order.steps for batch in step)

    assert padding("group_by_length") < padding("random") / 5


def test_batches_have_masks_and_ignored_labels_after_each_sample(gpt2: GPT2LMHeadModel) -> None:
    made = BatchesOfLengths((LengthBatch((3, 7), 8), LengthBatch((4, 4), 4)))
    dataset = build_dataset(described({"lengths": [5, 5]}), gpt2, 4, made)
    first, second = (dataset.collate([dataset[0], dataset[1]]) for _ in range(2))
    assert first["attention_mask"].sum(1).tolist() == [3, 7]
    assert (first["labels"] != -100).sum(1).tolist() == [3, 7]
    assert first["input_ids"].shape == (2, 8)
    assert second["attention_mask"].tolist() == [[1] * 4] * 2


def test_joined_batches_restart_their_positions(gpt2: GPT2LMHeadModel) -> None:
    workload = described({"lengths": [5, 5], "padding_free": True})
    dataset = build_dataset(workload, gpt2, 2, BatchesOfLengths((LengthBatch((2, 3), 5, is_joined=True),)))
    batch = dataset.collate([dataset[0], dataset[1]])
    assert batch["position_ids"].tolist() == [[0, 1, 0, 1, 2]]
    assert batch["labels"][0, [0, 2]].tolist() == [-100, -100]
    assert "attention_mask" not in batch


@pytest.mark.parametrize("is_joined", [False, True])
@pytest.mark.parametrize("is_mixed", [False, True])
def test_a_batch_of_a_shape_has_that_shape(*, is_joined: bool, is_mixed: bool) -> None:
    shape = BatchShape(1 if is_joined else 3, 17, is_mixed)
    assert LengthBatch.of(shape, Batching(None, is_joined=is_joined)).shape == shape


def test_too_few_samples_and_too_long_ones_are_refused(gpt2: GPT2LMHeadModel) -> None:
    with pytest.raises(WorkloadError, match="1 samples do not fill one step of 2"):
        orders(described({"lengths": [5]}))
    with pytest.raises(WorkloadError, match=r"data\.lengths: 65 is longer than the 64 positions"):
        build_dataset(described({"lengths": [65, 5]}), gpt2, 2)
    build_dataset(described({"lengths": [65, 5], "sequence_length": 64}), gpt2, 2)


def test_packs_of_samples_with_images_are_refused_by_name() -> None:
    """A pack would have the images of one sample only."""
    tiny = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    text = {**tiny, "model_type": "llama", "num_key_value_heads": 2, "vocab_size": 200}
    vision = {**tiny, "model_type": "clip_vision_model", "image_size": 32, "patch_size": 8}
    with torch.device("meta"):
        model = LlavaForConditionalGeneration(LlavaConfig(vision_config=vision, text_config=text))
    packs = {"lengths": [64] * 400, "packing": True, "sequence_length": 1024}
    with pytest.raises(WorkloadError, match="packs of LlavaForConditionalGeneration would hold the images"):
        build_dataset(described(packs), model, 2)


def test_models_whose_lengths_are_not_simulated_are_refused_by_name() -> None:
    with torch.device("meta"):
        images = ViTForImageClassification(ViTConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2))
        pair = BartForConditionalGeneration(
            BartConfig(
                d_model=16,
                encoder_layers=1,
                decoder_layers=1,
                vocab_size=300,
                encoder_attention_heads=2,
                decoder_attention_heads=2,
            )
        )
    with pytest.raises(WorkloadError, match="ViTForImageClassification reads images or audio"):
        build_dataset(described({"lengths": [5, 6]}), images, 2)
    for kind in ("whisper", "wav2vec2"):
        with torch.device("meta"):
            model = AutoModel.from_config(AutoConfig.for_model(kind))
        with pytest.raises(WorkloadError, match="reads images or audio: give sizes in pixels"):
            build_dataset(described({"lengths": [5, 6]}), model, 2)
    with pytest.raises(WorkloadError, match=r"give all targets one data\.target_length"):
        build_dataset(described({"lengths": [5, 6]}), pair, 2)
    with pytest.raises(WorkloadError, match="is no causal language model"):
        build_dataset(described({"lengths": [5, 6], "padding_free": True, "target_length": 4}), pair, 2)
    batch = build_dataset(described({"lengths": [5, 6], "target_length": 4}), pair, 2).collate([{}, {}])
    assert (batch["input_ids"].shape, batch["labels"].shape) == ((2, 6), (2, 4))


def of_trl(loop: str = "sft", trl: dict | None = None, **data: object) -> Workload:
    """Return a training by TRL with samples of 8 to 90 tokens."""
    lengths = {"distribution": "uniform", "minimum": 8, "maximum": 90, "samples": 60, "orders": 3}
    return Workload.from_mapping(
        {
            "model": {"id": "gpt2"},
            "loop": loop,
            "data": {"lengths": lengths, **data},
            "train": {"per_device_train_batch_size": 4},
            "trl": trl or {},
        }
    )


BATCHES_OF_TRL = {
    "padded": of_trl(),
    "rounded up": of_trl(trl={"pad_to_multiple_of": 16}),
    "prompts": of_trl(prompt_length=7),
    "cut": of_trl(trl={"max_length": 40}),
    "joined": of_trl(trl={"padding_free": True, "max_length": None, "pad_to_multiple_of": "32"}),
    "best fit": of_trl(trl={"packing": True, "max_length": 100}, prompt_length=7),
    "split": of_trl(trl={"packing": True, "max_length": 64, "packing_strategy": "bfd_split"}),
    "wrapped": of_trl(trl={"packing": True, "max_length": 64, "packing_strategy": "wrapped"}),
    "pairs": of_trl("dpo", prompt_length=7),
}


@pytest.mark.parametrize("name", BATCHES_OF_TRL)
def test_a_batch_of_a_shape_of_trl_has_that_shape_and_keeps_its_prompts(name: str) -> None:
    for library in ("trl", "datasets"):
        pytest.importorskip(library)
    workload = BATCHES_OF_TRL[name]
    batching = batching_of(workload)
    shapes = {batch.shape for order in orders(workload) for step in order.steps for batch in step}
    assert len(shapes) > 3 or name == "wrapped"
    for shape in shapes:
        made = LengthBatch.of(shape, batching)
        assert made.shape == shape
        assert batching.rounded_up(sum(made.lengths) if made.is_joined else max(made.lengths)) == shape.length
        assert batching.prompt is not None
        assert min(made.lengths) > batching.prompt


def test_reward_models_leave_out_what_is_too_long() -> None:
    assert max(sample_lengths(of_trl("reward"))) > 40
    found = sample_lengths(of_trl("reward", trl={"max_length": 40}))
    assert max(found) <= 40
    assert len(found) < 60
    with pytest.raises(WorkloadError, match=r"all samples are longer than trl\.max_length, 7"):
        sample_lengths(of_trl("reward", trl={"max_length": 7}))


def test_samples_without_a_token_after_the_prompt_are_refused() -> None:
    with pytest.raises(WorkloadError, match=r"data\.prompt_length: 8 leaves nothing of the shortest sample"):
        sample_lengths(of_trl(prompt_length=8))
