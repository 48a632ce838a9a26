"""R2: the terms that a leader believes, at their bounds."""

import pytest

from evenkeel_moe.protocol.terms import MAX_TERM, MAX_TERM_RISE, is_credible_term


@pytest.mark.parametrize(
    ("term", "known", "credible"),
    [
        (5 + MAX_TERM_RISE, 5, True),
        (6 + MAX_TERM_RISE, 5, False),
        (MAX_TERM - 1, MAX_TERM - 2, True),
        (MAX_TERM, MAX_TERM - 1, False),
    ],
)
def test_a_term_may_rise_by_so_much_and_only_so_far(term, known, credible):
    assert is_credible_term(term, known) is credible
