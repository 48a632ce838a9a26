"""R3: what a rank may tell while the placement of its swap is being saved."""

from evenkeel_moe.model.ids import Epoch
from evenkeel_moe.protocol.messages import Ack, SendToController
from evenkeel_moe.protocol.rank.save_barrier import SaveBarrier
from tests.protocol.machines import key_of

ACKS = [SendToController(Ack(key_of(), Epoch(1), "new"), stream) for stream in range(300)]


def test_answers_wait_for_the_save_and_keep_their_order():
    barrier = SaveBarrier()
    assert barrier.outgoing(ACKS[0]) == [ACKS[0]]
    barrier.begin(Epoch(0), "old")
    assert [barrier.outgoing(ack) for ack in ACKS[:3]] == [[], [], []]
    assert barrier.told(Epoch(1), "new") == (0, "old")
    assert barrier.end() == ACKS[:3]
    assert barrier.end() == []
    assert barrier.told(Epoch(1), "new") == (1, "new")
    assert barrier.outgoing(ACKS[0]) == [ACKS[0]]


def test_a_bounded_number_of_answers_waits():
    barrier = SaveBarrier()
    barrier.begin(Epoch(0), "old")
    for ack in ACKS:
        barrier.outgoing(ack)
    assert barrier.end() == ACKS[-256:]


def test_while_two_saves_are_under_way_the_first_saved_placement_is_told():
    barrier = SaveBarrier()
    barrier.begin(Epoch(0), "zero")
    barrier.begin(Epoch(1), "one")
    assert barrier.told(Epoch(2), "two") == (0, "zero")
    barrier.end()
    assert barrier.told(Epoch(2), "two") == (2, "two")
