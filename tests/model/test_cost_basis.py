import pytest

from evenkeel_moe.model.cost import CostBasis, CostSource


@pytest.mark.parametrize(
    ("basis", "words"),
    [
        (CostBasis(), "by tokens, because nothing is known of time"),
        (CostBasis(detail="no rank told its device"), "by tokens (no rank told its device)"),
        (
            CostBasis(CostSource.DERIVED, "fp8 on H100", "s"),
            "derived, not measured (fp8 on H100)",
        ),
        (
            CostBasis(CostSource.PROFILED, "curves of 8 ranks", "s", 0.021),
            "profiled on the ranks (curves of 8 ranks, mean error 2.1%)",
        ),
        (CostBasis(CostSource.MEASURED, "", "s"), "measured while the ranks served"),
    ],
)
def test_a_basis_is_told_in_words(basis, words):
    assert basis.words == words
