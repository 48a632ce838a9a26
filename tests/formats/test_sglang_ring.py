"""In which order the steps of SGLang's ring buffer are read."""

import numpy as np
import pytest

from evenkeel_moe.formats import read_trace

torch = pytest.importorskip("torch")

STEPS = np.random.default_rng(3).integers(1, 9, (5, 2, 4), np.int32)


def _ring(path, written_from, busy):
    """The steps, written into a ring of 8 from some slot on; those not in `busy` routed nothing."""
    ring = np.zeros((8, 2, 4), np.int32)
    for step in busy:
        ring[(written_from + step) % 8] = STEPS[step]
    torch.save({"rank": 0, "logical_count": torch.tensor(ring)}, path)


@pytest.mark.parametrize("written_from", [0, 3])
def test_a_ring_is_read_as_stored_where_its_unwritten_stretch_lies_at_an_end(
    tmp_path, written_from
):
    busy = [0, 1, 3, 4]
    _ring(tmp_path / "d.pt", written_from, busy)
    trace = read_trace(tmp_path / "d.pt")
    np.testing.assert_array_equal(trace.counts, STEPS[busy])
    assert trace.notes == ("left out 4 of 8 steps: they routed nothing",)


@pytest.mark.parametrize("written_from", [4, 6, 7])
def test_a_ring_is_unrolled_from_its_only_empty_stretch_with_a_note(tmp_path, written_from):
    """A dump empties the ring and leaves the write position, so what follows may cross the end."""
    _ring(tmp_path / "d.pt", written_from, range(5))
    trace = read_trace(tmp_path / "d.pt")
    np.testing.assert_array_equal(trace.counts, STEPS)
    unrolled = (
        f"slots {written_from - 3}..{written_from - 1}, the only empty ones, are taken for the unwritten part of the"
        f" buffer, so that its oldest step is in slot {written_from}"
    )
    assert trace.notes == ("left out 3 of 8 steps: they routed nothing", unrolled)


@pytest.mark.parametrize(
    ("written_from", "busy", "stored", "places"),
    [(6, [0, 1, 3, 4], [3, 4, 0, 1], 2), (7, [0, 2, 4], [2, 4, 0], 3), (0, [0, 4], [0, 4], 2)],
)
def test_a_ring_with_empty_stretches_that_may_be_either_is_read_as_stored_with_a_note(
    tmp_path, written_from, busy, stored, places
):
    _ring(tmp_path / "d.pt", written_from, busy)
    trace = read_trace(tmp_path / "d.pt")
    np.testing.assert_array_equal(trace.counts, STEPS[stored])
    ambiguous = (
        f"the buffer is empty in {places} places, and its unwritten part cannot be told from steps that routed"
        " nothing: the order is ambiguous, taken as stored"
    )
    assert trace.notes[1:] == (ambiguous,)
