"""The bounds of terms: what the wire takes, and which term of a rank a leader believes (R2)."""

MAX_TERM = 1 << 52
"""The highest term on the wire, in both directions. The store's scripts count terms as doubles:
above 2**53 adding 1 would give the same term."""
MAX_TERM_RISE = 1 << 24
"""The most by which a rank's term may exceed the known one. One term a second for half a year is
less, also if the store lost its data; and at one such rise a second MAX_TERM is years away."""


def is_credible_term(term: int, known: int) -> bool:
    """R2: return True if a leader at term `known` may rise above the term that a rank names.

    Otherwise one wrong number would take the leader to a term that no rank accepts, for ever.
    """
    return term <= min(known + MAX_TERM_RISE, MAX_TERM - 1)
