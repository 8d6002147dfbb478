import pytest
import torch

from trainatomy.measurement.step.group import DRAWN, repeated_random_values


def test_large_tensors_repeat_a_few_random_numbers() -> None:
    with repeated_random_values():
        found = torch.nn.init.normal_(torch.empty(3, DRAWN), mean=1.0, std=0.5)
    assert torch.equal(found[0], found[2])
    assert found[0].mean().item() == pytest.approx(1.0, abs=0.01)
    assert found[0].std().item() == pytest.approx(0.5, abs=0.01)


def test_the_rest_that_fills_no_repetition_is_filled() -> None:
    with repeated_random_values():
        found = torch.empty(DRAWN + 7).fill_(9).uniform_(2, 3)
    assert 2 <= found.min().item() <= found.max().item() <= 3


def test_parameters_keep_their_identity_and_their_dtype() -> None:
    parameter = torch.nn.Parameter(torch.zeros(DRAWN + 1, dtype=torch.bfloat16))
    with repeated_random_values(), torch.no_grad():
        assert parameter.normal_() is parameter
    assert parameter.dtype == torch.bfloat16
    assert parameter.std().item() == pytest.approx(1.0, abs=0.05)


def test_small_tensors_are_drawn_as_always() -> None:
    expected = torch.empty(100).normal_(generator=torch.Generator().manual_seed(1))
    with repeated_random_values():
        assert torch.equal(torch.empty(100).normal_(generator=torch.Generator().manual_seed(1)), expected)


def test_pytorch_is_left_as_it_was() -> None:
    with pytest.raises(ZeroDivisionError), repeated_random_values():
        raise ZeroDivisionError
    assert "normal_" not in vars(torch.Tensor)
    assert "uniform_" not in vars(torch.Tensor)
