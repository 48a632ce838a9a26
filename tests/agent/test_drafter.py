"""A drafter (MTP) is a second deployment of the same ranks, with an agent of its own."""

from evenkeel_moe.protocol.messages import Ack, Commit, Vote
from tests.agent.fleet import Fleet
from tests.agent.ranks import LEADER, Group, identity_of, prepare_for, two_rank_placements

TARGET_OLD, TARGET_NEW = two_rank_placements()
DRAFTER_OLD, DRAFTER_NEW = two_rank_placements(layers=1)


class NamedGroup(Group):
    """Notes the name of every communicator: a name is used once per store."""

    def __init__(self, size):
        super().__init__(size)
        self.names = [[] for _ in range(size)]

    def connect(self, rank, name, device=None):
        self.names[rank].append(name)
        return super().connect(rank, name)


class Drafter(Fleet):
    def __init__(self, group):
        super().__init__(DRAFTER_OLD, group=group, steps=False, make_config=self._named)

    @staticmethod
    def _named(fleet, rank):
        return fleet.config(rank, identity=identity_of(rank, "toy-mtp"))


class WithDrafter(Fleet):
    """The target's ranks; each calls both boundaries between two steps, in the same order."""

    def __init__(self, group, drafter):
        self.drafter = drafter
        super().__init__(TARGET_OLD, group=group)

    def boundary(self, rank):
        super().boundary(rank)
        self.drafter.boundary(rank)
        self.drafter.epochs[rank].append(self.drafter.maps[rank].epoch)


def finish(fleet, prepare):
    fleet.say(Commit(LEADER, prepare.wave))
    return {int(link.expect(Ack).epoch) for link in fleet.links}


def test_target_and_drafter_move_apart_and_together_in_one_process_group():
    """On exit both fleets check that their epochs were equal on all ranks at every step."""
    group = NamedGroup(2)
    with Drafter(group) as drafter, WithDrafter(group, drafter) as target:
        # The drafter alone: the target's weights, map and epoch stay.
        wave = prepare_for(DRAFTER_OLD, DRAFTER_NEW)
        drafter.prepare(wave)
        assert finish(drafter, wave) == {1}
        assert all(weights.holds(DRAFTER_NEW) for weights in drafter.weights)
        assert all(weights.holds(TARGET_OLD) for weights in target.weights)
        assert all(agent.epoch == 0 for agent in target.agents)
        # Both at once: the copies of two waves are in flight in one process.
        back = prepare_for(DRAFTER_NEW, DRAFTER_OLD, plan="back", epoch=1)
        move = prepare_for(TARGET_OLD, TARGET_NEW)
        drafter.say(back)
        target.prepare(move)
        assert all(link.expect(Vote).yes for link in drafter.links)
        assert (finish(target, move), finish(drafter, back)) == ({1}, {2})
        assert all(weights.holds(DRAFTER_OLD) for weights in drafter.weights)
        assert all(weights.holds(TARGET_NEW) for weights in target.weights)
    for names in group.names:
        assert len(names) == len(set(names)) == 4
        assert {name.rpartition("/")[2] for name in names} == {"toy", "toy-mtp"}
