import pytest
import torch

from evenkeel_moe.dispatch.counts import check_counts, count_choices, occurrence
from evenkeel_moe.errors import InvalidInput, Reason, ShapeMismatch


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.bool, torch.complex64])
def test_types_that_cannot_count_are_refused(dtype):
    with pytest.raises(InvalidInput, match="cannot hold every whole number"):
        check_counts(torch.ones(3, dtype=dtype), (3,), "counts")


def test_half_precision_really_loses_tokens():
    assert int(torch.tensor(2049, dtype=torch.float16).to(torch.int64)) == 2048
    assert int(torch.tensor(257, dtype=torch.bfloat16).to(torch.int64)) != 257


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.int32, torch.int64, torch.float32, torch.float64]
)
def test_types_that_can_count_become_float64(dtype):
    values = check_counts(torch.tensor([0, 3, 200], dtype=dtype), (3,), "counts")
    assert values.dtype == torch.float64
    assert values.tolist() == [0, 3, 200]


def test_wrong_values_and_shapes_are_named():
    with pytest.raises(ShapeMismatch, match=r"demand must be \(2,\), got \(3,\)"):
        check_counts(torch.zeros(3), (2,), "demand")
    with pytest.raises(InvalidInput) as negative:
        check_counts(torch.tensor([1.0, -1.0]), (2,), "demand")
    assert negative.value.reason is Reason.NEGATIVE_COUNT
    for bad in (float("nan"), float("inf")):
        with pytest.raises(InvalidInput) as endless:
            check_counts(torch.tensor([1.0, bad]), (2,), "demand")
        assert endless.value.reason is Reason.NOT_FINITE


def test_choices_are_counted_without_padding():
    experts = torch.tensor([[0, 2], [2, -1], [-1, -1]])
    assert count_choices(experts, 4).tolist() == [1, 0, 2, 0]
    assert count_choices(torch.empty((0, 2), dtype=torch.int64), 3).tolist() == [0, 0, 0]


def test_occurrence_counts_earlier_choices_of_the_same_expert():
    experts = torch.tensor([[3, 1], [1, 3], [-1, 1]])
    index = occurrence(experts, 4)
    assert index[experts >= 0].tolist() == [0, 0, 1, 1, 2]
    generator = torch.Generator().manual_seed(1)
    many = torch.randint(-1, 5, (50, 3), generator=generator)
    seen = [0] * 5
    for expert, got in zip(
        many.reshape(-1).tolist(), occurrence(many, 5).reshape(-1).tolist(), strict=True
    ):
        if expert >= 0:
            assert got == seen[expert]
            seen[expert] += 1
