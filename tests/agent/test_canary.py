"""The canary: registration, moves without damage, damage of every kind, and what is due when."""

import numpy as np
import pytest
import structlog
import torch

from evenkeel_moe.agent.canary import Answer, answers_apart, distance, fixed_token, sketch_of
from evenkeel_moe.agent.canary_runs import rounding_limit
from evenkeel_moe.errors import PeerViolation
from tests.agent.expert_mlp import DTYPES, PARTS, Slots, mlp_ranks

# Six experts in eight slots; two have a replica on the other rank.
MAP = [[0, 1, 2, 3, 0, 4, 5, 1]]
LESS = [name for name in PARTS if name != "scale"]


def exchanged(map_, *pairs):
    """Return the map after slots have traded their experts."""
    new = np.array(map_)
    for a, b in pairs:
        new[0, [a, b]] = new[0, [b, a]]
    return new


NEW = exchanged(MAP, (2, 5), (3, 6))
"""Experts 2 and 4, and 3 and 5, change ranks."""


@pytest.mark.parametrize("kind", DTYPES)
def test_a_thousand_moves_are_not_taken_for_damage(kind):
    ranks = mlp_ranks(kind, MAP, 6)
    ranks.register()
    ranks.move_at_random(1000)
    assert ranks.alarms == []
    assert sum(told.moved for told in ranks.told) == sum(told.same for told in ranks.told) >= 1000
    assert all(told.different == told.blind == 0 for told in ranks.told)


def scale_left(slots, layer, local, source):
    slots.take(layer, local, source, parts=LESS)


def alias_left(slots, layer, local, source):
    """The kernel reads another tensor than the one that moves."""
    slots.take(layer, local, source, parts=["w_in", "w_out", "scale"])


def not_derived(slots, layer, local, source):
    slots.take(layer, local, source)
    slots.packed[layer, local] = 0


def swizzled_as_plain(slots, layer, local, source):
    slots.take(layer, local, source)
    plain = source[0].w_out[layer, source[1]]
    slots.packed[layer, local].copy_(plain.reshape(slots.packed[layer, local].shape))


def cast(slots, layer, local, source):
    slots.take(layer, local, source)
    narrow = torch.float8_e5m2 if slots.w_in.element_size() > 1 else torch.int8
    weights = slots.w_in[layer, local]
    weights.copy_(weights.float().to(narrow).float())


def one_bit(slots, layer, local, source):
    """The highest bit of the exponent of the largest weight."""
    slots.take(layer, local, source)
    flat = slots.w_in[layer, local].view(-1)
    at = int(flat.float().abs().argmax())
    number = flat[at : at + 1].view(torch.uint8)
    number[-1] ^= 0b0100_0000


def ends_early(slots, layer, local, source):
    slots.take(layer, local, source, parts=["w_in", "scale"])
    half = slots.packed.shape[2] // 2
    slots.packed[layer, local, :half] = source[0].packed[layer, source[1], :half]


def neighbour(slots, layer, local, source):
    """Two experts are exchanged: the slot gets the one beside it."""
    slots.take(layer, local, (source[0], (source[1] + 1) % 4))


DAMAGE = [
    scale_left,
    alias_left,
    not_derived,
    swizzled_as_plain,
    cast,
    one_bit,
    ends_early,
    neighbour,
]


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("kind", DTYPES)
def test_damage_is_found_and_named(kind, damage):
    ranks = mlp_ranks(kind, MAP, 6)
    ranks.register()

    def copy(slots, layer, local, source):
        # Expert 4 comes to slot 2 of rank 0; all others move as they should.
        broken = slots is ranks.slots[0] and local == 2
        (damage if broken else Slots.take)(slots, layer, local, source)

    ranks.move(NEW, copy)
    ranks.ask()
    (alarm,) = ranks.alarms
    assert alarm.startswith("layer 0 expert 4 in slot 2 of rank 0 does not answer")
    assert "checksum_mismatch" in alarm
    assert [(told.moved, told.same, told.different) for told in ranks.told] == [
        (2, 1, 1),
        (2, 2, 0),
    ]


@pytest.mark.parametrize(
    ("noise", "alike", "found"),
    [(0.0, True, True), (1e-3, True, True), (0.5, False, None)],
    ids=["same bits", "rounding of the kernel", "damage at the start"],
)
def test_the_tolerance_comes_from_replicas(noise, alike, found):
    """The second rank's kernel rounds otherwise; a scale left behind still differs by far more."""
    ranks = mlp_ranks("bfloat16", MAP, 6)
    answer, slots = ranks.slots[1].answer, ranks.slots[1]
    slots.answer = lambda layer, local: answer(layer, local).float() * (1 + noise)
    if not alike:
        with pytest.raises(PeerViolation, match=r"differ in their answer by .*: layer 0 expert"):
            ranks.register()
        return
    ranks.register()
    ranks.move(NEW)
    ranks.ask()
    assert ranks.alarms == []
    ranks.move(MAP, scale_left)
    ranks.ask()
    assert bool(ranks.alarms) == found


def test_without_replicas_only_what_rounding_cannot_explain_is_damage():
    ranks = mlp_ranks("bfloat16", [[0, 1, 2, 3]], 4)
    ranks.register()
    assert ranks.canaries[0]._canary.tolerance == rounding_limit(torch.bfloat16)
    ranks.move([[2, 1, 0, 3]], scale_left)
    ranks.ask()
    assert len(ranks.alarms) == 2


def slightly(slots, layer, local, source):
    slots.take(layer, local, source)
    slots.scale[layer, local] *= 1.005


@pytest.mark.parametrize("tuned", [True, False])
def test_a_kernel_that_was_tuned_again_is_told_from_damage(tuned):
    """Slots that never moved differ as well then; damage of that size shows only in moved ones."""
    ranks = mlp_ranks("bfloat16", MAP, 6)
    ranks.register()
    for slots in ranks.slots if tuned else ():
        slots.answer = lambda *slot, answer=slots.answer: answer(*slot).float() * 1.001
    ranks.move(NEW, Slots.take if tuned else slightly)
    ranks.ask()
    assert bool(ranks.alarms) != tuned
    assert sum(told.same for told in ranks.told) == (4 if tuned else 0)


def test_an_exchange_that_cannot_show_is_told():
    ranks = mlp_ranks("float32", [[0, 1, 2, 3, 0, 1, 4, 5]], 6)
    # Experts 2 and 3 have the same weights.
    for name in PARTS:
        tensor = getattr(ranks.slots[0], name)
        tensor[0, 3] = tensor[0, 2]
    with structlog.testing.capture_logs() as said:
        ranks.register()
    assert {line["blind"] for line in said if line["event"] == "canary_registered"} == {2}
    ranks.move(exchanged([[0, 1, 2, 3, 0, 1, 4, 5]], (3, 6)))
    ranks.ask()
    assert [(told.same, told.blind) for told in ranks.told] == [(1, 0), (1, 1)]


def test_a_rank_that_cannot_ask_its_experts_switches_the_canary_off_on_all():
    ranks = mlp_ranks("float32", MAP, 6)

    def fails(*_):
        raise RuntimeError("no kernel")

    ranks.slots[1].answer = fails
    with structlog.testing.capture_logs() as said:
        ranks.register()
    off = sorted(line["detail"] for line in said if line["event"] == "canary_off")
    assert [line.startswith("ranks [1] cannot ask their experts") for line in off] == [True] * 2
    assert "no kernel" in "".join(off)
    ranks.move(NEW, scale_left)
    ranks.ask()
    assert (ranks.told, ranks.alarms) == ([], [])


def test_a_slot_that_moved_again_before_it_was_asked_is_left_out():
    ranks = mlp_ranks("float32", MAP, 6)
    ranks.register()
    ranks.move(NEW)
    first = ranks.placement
    ranks.move(exchanged(NEW, (2, 5)))
    ranks.ask()
    assert ranks.placement != first and ranks.alarms == []
    assert [(told.moved, told.same) for told in ranks.told] == [(2, 1), (1, 1), (2, 1), (1, 1)]


def test_a_step_waits_no_longer_than_the_canary_may_take():
    ranks = mlp_ranks("float32", MAP, 6)
    now = [0.0]

    def slow(layer, local, answer=ranks.slots[0].answer):
        now[0] += 0.4
        return answer(layer, local)

    ranks.slots[0].answer = slow
    canary = ranks.canaries[0]
    canary._now = lambda: now[0]
    ranks.register()
    ranks.move(exchanged(MAP, (0, 4), (1, 7), (2, 5), (3, 6)))
    spent = []
    for _ in range(4):
        began = now[0]
        canary.ask(ranks.placement)
        spent.append(round(now[0] - began, 3))
    # Slots 0 and 1 keep their experts' names, so two slots are due; one second holds two answers.
    assert spent == [0.8, 0.0, 0.0, 0.0]
    canary._step_s = 0.1
    ranks.move(exchanged(ranks.placement.phy2log, (2, 5), (3, 6)))
    spent = []
    for _ in range(10):
        began = now[0]
        canary.ask(ranks.placement)
        spent.append(round(now[0] - began, 3))
    assert sum(spent) == pytest.approx(0.8) and max(spent) == 0.4
    assert np.flatnonzero(spent)[1] - np.flatnonzero(spent)[0] == 4, "0.1 s in each step"


def test_weights_that_are_being_replaced_are_not_asked():
    ranks = mlp_ranks("float32", MAP, 6)
    ranks.register()
    ranks.move(NEW, scale_left)
    for canary in ranks.canaries:
        canary.pause()
    ranks.ask()
    assert ranks.alarms == []
    for rank, slots in enumerate(ranks.slots):
        for local in range(4):
            slots.load(0, local, int(NEW[0, 4 * rank + local]))
    ranks.register()
    ranks.move(MAP)
    ranks.ask()
    assert ranks.alarms == [] and sum(told.same for told in ranks.told) == 4


def test_sketches_keep_distances():
    random = np.random.default_rng(3)
    errors = []
    for _ in range(200):
        one, other = random.standard_normal((2, 64))
        true = np.linalg.norm(one - other) / max(np.linalg.norm(one), np.linalg.norm(other))
        errors.append(float(distance(sketch_of(one), sketch_of(other))) / true)
    assert 0.8 < np.mean(errors) < 1.25 and min(errors) > 0.3


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_an_answer_that_is_not_finite_differs_from_every_other(value):
    whole = np.ones(8)
    broken = np.where(np.arange(8) == 3, value, whole)
    one = Answer(1, lambda: sketch_of(whole))
    other = Answer(2, lambda: sketch_of(broken))
    assert answers_apart(one, other) == np.inf
    assert answers_apart(other, other) == 0.0


def test_the_token_is_the_same_everywhere():
    assert fixed_token(4).tolist() == pytest.approx(fixed_token(9)[:4].tolist())
    assert np.abs(fixed_token(4096)).max() <= 2 and abs(fixed_token(4096).mean()) < 0.1
