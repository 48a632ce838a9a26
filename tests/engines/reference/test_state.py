"""Saved placements, and the group's choice among them."""

import numpy as np
import pytest

from evenkeel_moe.engines.reference.joining import agree_on_placement
from evenkeel_moe.engines.reference.state import SavedPlacement, load_placement, save_placement
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.topology import ModelShape
from tests.agent.ranks import Group, run_ranks
from tests.waiting import deadline

SHAPE = ModelShape(1, 4, 2, 3, 1, 100)
OLD = Placement(np.array([[0, 1, -1, 2, 3, -1]], np.int32), 2, 4)
NEW = Placement(np.array([[1, 0, 2, 3, 2, -1]], np.int32), 2, 4)


def test_a_placement_is_saved_whole_and_damage_reads_as_nothing(tmp_path):
    path = tmp_path / "state" / "rank-0.npz"
    assert load_placement(path, SHAPE) is None
    save_placement(path, SavedPlacement(NEW, 3, "g"))
    saved = load_placement(path, SHAPE)
    assert saved is not None
    assert (saved.placement, saved.epoch, saved.generation) == (NEW, 3, "g")
    assert list(path.parent.iterdir()) == [path]
    assert load_placement(path, ModelShape(1, 4, 2, 4, 1, 100)) is None
    whole = path.read_bytes()
    for damaged in (whole[:100], *damage_to(whole)):
        path.write_bytes(damaged)
        assert load_placement(path, SHAPE) is None


def damage_to(whole):
    """Yield copies with one changed byte of the archive's directory: version, flags or method."""
    entry = whole.index(b"PK\x01\x02")
    for offset, value in ((6, 255), (8, 1), (8, 32), (8, 64), (10, 99)):
        damaged = bytearray(whole)
        damaged[entry + offset] = value
        yield bytes(damaged)


@pytest.mark.parametrize("epochs, want", [((0, 0), 0), ((3, 2), 3), ((0, 4), 4), ((2, 2), 2)])
def test_the_newest_saved_placement_wins_on_every_rank(epochs, want):
    """A rank at the new epoch proves that the gate passed on all ranks."""
    group = Group(2, timeout_s=deadline(20))

    def work(rank):
        communicator = group.connect(rank, "engine")
        saved = SavedPlacement(NEW, epochs[rank], "g") if epochs[rank] == max(epochs) else None
        if saved is None and epochs[rank]:
            saved = SavedPlacement(OLD, epochs[rank], "g")
        return agree_on_placement(saved if epochs[rank] else None, OLD, communicator)

    for placement, epoch, warm in run_ranks(2, work):
        assert epoch == want and warm == (want > 0)
        assert placement == (NEW if want else OLD)
