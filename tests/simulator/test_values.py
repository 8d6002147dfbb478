"""Values that Python reads from meta tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from trainatomy.errors import SimulationError
from trainatomy.simulator.process import SimulatedProcess


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
@pytest.mark.parametrize("padded", [False, True])
def test_a_mask_that_came_with_the_batch_is_known(process: SimulatedProcess, padded: bool, dtype: torch.dtype) -> None:
    mask = torch.ones(2, 8, dtype=dtype)
    mask[1, 6:] = not padded
    mask = mask.to("cuda")
    assert bool(mask.all()) is not padded
    assert bool((mask == 0).any()) is padded
    assert bool(torch.all(mask[:, None, None, :].bool())) is not padded
    assert int(mask.sum()) == (14 if padded else 16)
    assert mask.sum(-1).max().item() == 8


def test_a_mask_of_attention_over_a_whole_batch_is_known(process: SimulatedProcess) -> None:
    mask = torch.ones(2, 512, dtype=torch.bool).to("cuda")
    attends = mask[:, None, None, :] & mask[:, None, :, None]
    assert attends.shape == (2, 1, 512, 512)
    assert (attends[:, 0, 0] < 0).nonzero().shape == (0, 2)


def test_values_that_are_all_the_same_are_known_as_such(process: SimulatedProcess) -> None:
    values = process.recorder.values
    assert values.is_uniform(3 * torch.ones(2, 6, dtype=torch.long, device="cuda"))
    assert not values.is_uniform(torch.arange(6, device="cuda"))
    assert not values.is_uniform(torch.empty(6, dtype=torch.long, device="cuda"))  # not known


def test_a_tensor_on_the_cpu_becomes_an_array(process: SimulatedProcess) -> None:
    """Check the conversion to an array by which SciPy reads the matching costs of a detector."""
    assert torch.tensor([3, 4]).to("cuda").cpu().numpy().tolist() == [3, 4]
    assert torch.empty(2, 2, device="cuda").cpu().numpy().tolist() == [[0.0, 0.0], [0.0, 0.0]]
    assert torch.empty(2, device="cuda").cpu().__array__().tolist() == [0.0, 0.0]
    with pytest.raises(TypeError, match=r"copy it to the host"):
        torch.empty(2, device="cuda").numpy()


def test_positions_are_known(process: SimulatedProcess) -> None:
    positions = torch.arange(5, device="cuda")
    assert int(positions[-1]) == 4
    assert bool((positions[1:] > positions[:-1]).all())
    assert (positions + 3).max().item() == 7


def test_known_values_follow_in_place_writes(process: SimulatedProcess) -> None:
    labels = torch.tensor([1, 2, 3]).to("cuda")
    labels.add_(4)
    assert labels.sum().item() == 18


def test_values_are_those_that_the_host_had_when_it_copied_them(process: SimulatedProcess) -> None:
    source = torch.zeros(4, dtype=torch.long)
    copied = source.to("cuda")
    source.fill_(7)
    assert copied.sum().item() == 0
    source.data = torch.empty(4, device="cuda")  # as FSDP moves a buffer
    assert copied.cpu().tolist() == [0, 0, 0, 0]


def test_overwriting_with_unknown_values_discards_known_ones(process: SimulatedProcess) -> None:
    labels = torch.tensor([1, 2, 3]).to("cuda")
    labels.copy_(torch.empty(3, device="cuda").argsort())
    assert labels.sum().item() == 0


def test_equality_of_known_values(process: SimulatedProcess) -> None:
    one, same, other = (torch.tensor(values).to("cuda") for values in ([1, 2], [1, 2], [1, 3]))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_a_loss_reads_as_zero_and_a_bool_as_true(process: SimulatedProcess) -> None:
    loss = torch.empty(4, device="cuda").mean()
    assert loss.item() == 0.0
    assert float(loss) == 0.0
    assert bool(loss < 3)
    assert bool((torch.empty(4, device="cuda") > 0).all())


@pytest.mark.parametrize(
    "question",
    [
        lambda x: torch.isnan(x),
        lambda x: torch.isinf(x.sum()),
        lambda x: torch.isnan(x).any(),
        lambda x: (torch.isnan(x) | torch.isinf(x)).any(),
        lambda x: torch.isnan(x).to(torch.bool).all(),
        lambda x: torch.isnan(x)._is_any_true(),  # autograd's anomaly mode
        lambda x: (x != x).any(),
        lambda x: torch.isneginf(x).any() | torch.isposinf(x).any(),
        lambda x: (~torch.isfinite(x)).any(),
        lambda x: ~torch.isfinite(x).all(),
        lambda x: torch.logical_not(torch.isfinite(x) & torch.isfinite(x.abs())).any(),
        lambda x: (x.abs() == float("inf")).any(),
        lambda x: (x == float("-inf")).any(),
        lambda x: (x > torch.finfo(x.dtype).max).any(),
    ],
)
def test_nothing_overflows(process: SimulatedProcess, question: Any) -> None:
    assert not bool(question(torch.empty(1, device="cuda")))


def test_no_number_overflows_where_they_are_counted(process: SimulatedProcess) -> None:
    numbers = torch.empty(4, device="cuda")
    assert torch.isnan(numbers).sum() == 0 and torch.isinf(numbers).count_nonzero() == 0
    assert (numbers > 0).sum() != 3, "what is not known to be False is not counted"
    labels = torch.randn(4, 9, device="cuda").argmax(1)
    assert (labels == 2).sum() != 3, "the equality of unknown numbers is assumed, and not counted"


def test_unknown_whole_numbers_differ(process: SimulatedProcess) -> None:
    token = torch.randn(4, 9, device="cuda").argmax(1)
    last = torch.tensor(2)
    reads = process.recorder.scalar_reads
    assert not reads.numbers_differ
    assert token[0] != last and not bool(torch.isnan(torch.empty(1, device="cuda")))
    assert not reads.numbers_differ
    for equal in (token[0] == 2, last == token[0], torch.isin(token, last).any(), (token == last.cuda()).cpu().all()):
        reads.numbers_differ = False
        assert not bool(equal)
        assert reads.numbers_differ
    assert bool(last.cuda() == 2)


def test_a_known_false_value_expires_with_its_tensor(process: SimulatedProcess) -> None:
    """Check that a new tensor with the same storage id does not inherit known values."""
    for _ in range(50):
        assert not bool(torch.isnan(torch.empty(1, device="cuda")))
        assert bool(torch.empty(1, device="cuda") > 0)


def test_masks_index_tensors_on_the_cpu(process: SimulatedProcess) -> None:
    ids = torch.tensor([1, 2, 3, 2])
    ids[ids == 2] = 9
    assert ids.tolist() == [1, 9, 3, 9]
    assert ids[ids == 9].tolist() == [9, 9] and torch.masked_select(ids, ids < 4).tolist() == [1, 3]


def test_cpu_tensors_keep_their_values(process: SimulatedProcess) -> None:
    assert torch.tensor([2.5]).item() == 2.5
    assert not bool((torch.arange(3) > 1).all())


@pytest.mark.parametrize("known", [False, True])
def test_ctc_reads_its_lengths_on_the_cpu(process: SimulatedProcess, known: bool) -> None:
    """Alpha has a state for each token of the longest target and one around each.

    So has beta while the gradient is computed (LossCTC.cu).
    """
    frames, samples, letters, longest = 50, 2, 32, 6
    logits = torch.empty(frames, samples, letters, device="cuda", requires_grad=True)
    targets = torch.empty(samples, 8, dtype=torch.long, device="cuda")
    inputs, outputs = torch.tensor([frames, 40]).to("cuda"), torch.tensor([longest, 3]).to("cuda")
    if not known:
        outputs = torch.empty(2, device="cuda").argsort()
    probabilities = torch.log_softmax(logits, -1)
    torch.nn.functional.ctc_loss(probabilities, targets, inputs, outputs).backward()
    assert logits.grad is not None
    alpha = samples * frames * (2 * (longest if known else 8) + 1) * 4
    sizes = {
        process.trace.origins[e.allocation].operation: e.bytes
        for e in process.trace.events
        if e.action == "alloc" and e.bytes == alpha
    }
    assert list(sizes) == ["aten::_ctc_loss", "aten::_ctc_loss_backward (beta)"]


def test_a_cpu_scalar_fills_a_gpu_tensor(process: SimulatedProcess) -> None:
    scores = torch.empty(2, 4, device="cuda", requires_grad=True)
    filled = scores.masked_fill(scores > 0, torch.tensor(torch.finfo(torch.float32).min))
    assert filled.is_cuda and filled.shape == (2, 4)
    filled.sum().backward()
    assert torch.zeros(3, device="cuda").masked_fill_(torch.ones(3, device="cuda").bool(), torch.tensor(1.0)).is_cuda


def test_a_gpu_tensor_is_not_copied(process: SimulatedProcess) -> None:
    ids = torch.tensor([1, 2, 3]).to("cuda")
    before = len(process.trace.origins)
    same = torch.as_tensor(ids, device="cuda")
    assert len(process.trace.origins) == before
    assert same.sum().item() == 6
    assert torch.asarray(ids, dtype=torch.float32, device=ids.device).dtype == torch.float32


def test_numbers_that_follow_from_a_mask_are_known(process: SimulatedProcess) -> None:
    mask = torch.tensor([[1, 1, 0]]).to("cuda")
    added = (1.0 - mask.to(torch.float16)) * torch.finfo(torch.float16).min
    assert (added < 0).nonzero().shape == (1, 2)
    assert torch.where(mask.bool(), torch.tensor(0.0, device="cuda"), -1.0)[0, 2].item() == -1.0
    assert torch.ones(1, 3, device="cuda").sum().item() == 3.0
    assert mask.float().new_ones(2, 2).sum().item() == 4.0


def test_floating_point_data_is_not_known(process: SimulatedProcess) -> None:
    pixels = torch.tensor([0.5, 2.0]).to("cuda")
    assert pixels.sum().item() == 0.0
    known = torch.zeros(2, device="cuda")
    known.add_(pixels)
    assert (known + 1).sum().item() == 0.0


def test_data_decides_the_size_of_a_result_and_nothing_else(process: SimulatedProcess) -> None:
    """Check what Idefics does: it leaves out the images that are black."""
    images = torch.ones(3, 1, 2, 2)
    images[1] = 0
    found = images.to("cuda").to(torch.bfloat16)
    black = (found == 0).sum(dim=(-1, -2, -3)) == 4
    assert found[~black].shape == (2, 1, 2, 2)
    found.add_(1)
    assert (found > 1).nonzero().shape == (8, 4)
    assert found.sum().item() == 0.0


def test_a_mask_may_begin_as_zeros_in_the_shape_of_unknown_logits(process: SimulatedProcess) -> None:
    words = torch.tensor([[1, 1, 0]]).to("cuda")
    logits = torch.empty(1, 2, 5, device="cuda")
    mask = torch.zeros_like(logits, dtype=words.dtype)
    mask[:, :, :3] = words[:, None, :]
    assert torch.masked_select(logits, mask.bool()).shape == (4,)


def test_a_tensor_of_known_values_can_be_read_as_a_list(process: SimulatedProcess) -> None:
    lengths = torch.tensor([3, 1]).to("cuda")
    assert (lengths + 1).tolist() == [4, 2]
    with pytest.raises(SimulationError, match="cannot be executed without data"):
        torch.empty(2, dtype=torch.long, device="cuda").tolist()
    assert torch.empty(2, device="cuda").tolist() == [0.0, 0.0]  # as .item() answers


def test_large_masks_are_computed_on_demand_from_their_original_inputs(process: SimulatedProcess) -> None:
    mask = torch.ones(1, 1, 400, 400, dtype=torch.int64)
    mask[..., 7:] = 0
    known = mask.to("cuda")
    lengths = (known > 0).sum(-1)  # deferred: 160,000 bools
    known.mul_(0)
    assert lengths.max().item() == 7
    assert known.sum().item() == 0
    assert (known == 0).all()


def test_a_router_is_assumed_to_choose_evenly_where_its_choices_decide_a_size(process: SimulatedProcess) -> None:
    scores = torch.randn(12, 4, device="cuda", requires_grad=True)
    chosen = torch.topk(scores, 2).indices
    rows, slots = torch.where(chosen == 3)
    assert rows.shape == slots.shape == (6,)
    hit = torch.nn.functional.one_hot(chosen, 4).sum((0, 1)).nonzero()
    assert [int(each) for each in hit] == [0, 1, 2, 3]
    assert [bool(each[0] == 4) for each in hit] == [False] * 4  # as transformers skips experts of other ranks
    assert process.recorder.values.deciding == {"choice"}


@pytest.mark.parametrize("keepdim", [False, True])
def test_an_argmax_is_assumed_to_spread_along_its_dimension(process: SimulatedProcess, keepdim: bool) -> None:
    scores = torch.randn(6, 3, 5, device="cuda")
    found = scores.argmax(1, keepdim=keepdim)
    assert (found == 2).nonzero().shape[0] == 10
    assert int((scores.max(1).indices == 0).sum()) == 10


def test_choices_that_decide_nothing_are_not_said(process: SimulatedProcess) -> None:
    chosen = torch.randn(6, 5, device="cuda").topk(2).indices
    assert not bool((chosen == 9).any())  # unknown whole numbers are taken to differ
    torch.randn(6, 5, device="cuda").gather(1, chosen)
    assert not process.recorder.values.deciding


def test_choices_of_known_scores_are_what_they_are(process: SimulatedProcess) -> None:
    chosen = torch.tensor([[1, 5, 3], [9, 2, 4]]).to("cuda").argmax(1)
    assert chosen.tolist() == [1, 0]
    assert not process.recorder.values.deciding


def test_a_mask_converted_on_its_way_to_the_gpu_is_known(process: SimulatedProcess) -> None:
    mask = torch.tensor([1.0, 0.0, 1.0]).to(device="cuda", dtype=torch.bool)
    assert torch.randn(3, 4, device="cuda")[mask].shape == (2, 4)


def test_masks_of_random_numbers_select_as_many_as_on_a_gpu(process: SimulatedProcess) -> None:
    torch.manual_seed(1)
    before, found = torch.default_generator.get_state(), torch.randn(100, 100, device="cuda")
    assert 1300 < len(found[torch.rand(100, 100, device="cuda") < 0.15]) < 1700
    parts = torch.randint(1, 5, (1000,), device="cuda")
    assert sum(len((parts == part).nonzero()) for part in range(1, 5)) == 1000
    assert len((torch.randperm(9, device="cuda") < 4).nonzero()) == 4
    known = torch.full((400,), 0.5, device="cuda")
    assert 100 < len((torch.bernoulli(known) > 0).nonzero()) < 300
    assert process.recorder.values.deciding == {"draw"}
    assert torch.default_generator.get_state().equal(before)  # the GPU has a generator of its own


@pytest.mark.parametrize("order", [1, -1])
def test_a_long_chain_of_values_is_computed_in_order(process: SimulatedProcess, order: int) -> None:
    """As of a generation, whose tokens follow from each other; none is read before its end."""
    tokens, kept = torch.randn(2, 9, device="cuda").argmax(1)[:, None], []
    for _ in range(3000):
        tokens = torch.cat([tokens, tokens[:, -1:] + 1], 1) if tokens.shape[1] < 20 else tokens + 1
        kept.append(tokens)
    kept[::order][0].add_(1)
    assert (tokens > 2980).nonzero().shape[0] == 40
    found = torch.zeros(2, dtype=torch.long, device="cuda")
    found[(tokens > 0).any(1)] = (tokens > 0).int().argmax(1)[(tokens > 0).any(1)]
    assert (found == 0).nonzero().shape == (2, 1)


@pytest.mark.parametrize(
    "fails",
    [
        lambda ids: ids[ids + 9],
        lambda ids: torch.ones(9, dtype=torch.long, device="cuda").index_select(0, ids + 900),
        lambda ids: ids // torch.zeros_like(ids),
        lambda ids: ids.unsqueeze(1).gather(1, (ids + 900).unsqueeze(1)),
    ],
)
def test_a_value_that_the_host_cannot_compute_is_unknown_and_so_is_what_follows(
    process: SimulatedProcess, fails: Any
) -> None:
    ids = torch.randn(4, 9, device="cuda").argmax(1)
    found = fails(ids)
    marked = torch.zeros(2, dtype=torch.long, device="cuda")
    marked[0] = 1  # computes what waits
    following = torch.cat([found.flatten(), found.flatten()])[1:] == 1
    process.recorder.sizes.assumes = lambda name: None
    assert following.nonzero().shape[0] == following.numel()
