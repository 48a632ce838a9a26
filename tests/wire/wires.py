"""Messages on the wire, for the tests of the codec."""

import dataclasses

import numpy as np
import pytest

from evenkeel_moe.errors import PeerViolation
from evenkeel_moe.model.ids import Epoch
from evenkeel_moe.model.load import CountingSide, LoadReport, Phase, StepMeta, step_table
from evenkeel_moe.model.plan import Wave
from evenkeel_moe.protocol import messages as m
from evenkeel_moe.wire.from_rank import decode_rank_message, encode_rank_message
from tests.wire.strategies import IDENTITY, SHAPE

HELLO = m.Hello(IDENTITY, SHAPE, "node-0", "", Epoch(0), "d" * 32, 1, "c", 1000, 500, "gate")


def same(one, other):
    """Equality that looks into arrays and placements compared by value."""
    if isinstance(one, np.ndarray):
        if one.dtype.names:  # In a table of steps NaN is what was not measured.
            return one.dtype == other.dtype and one.tobytes() == other.tobytes()
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, LoadReport | m.Prepare | Wave):
        return type(one) is type(other) and all(
            same(getattr(one, f.name), getattr(other, f.name)) for f in dataclasses.fields(one)
        )
    return one == other


def over_the_wire(message):
    return type(message).FromString(message.SerializeToString())


def refusal(message, hello=HELLO):
    with pytest.raises(PeerViolation) as caught:
        decode_rank_message(message, hello)
    return caught.value


def make_report(**changes):
    steps = step_table(
        [StepMeta(7, 2, Phase.DECODE, 5, compute_s=0.25), StepMeta(8, 2, Phase.DECODE, 6)]
    )
    report = LoadReport(
        IDENTITY.deployment,
        IDENTITY.generation,
        IDENTITY.rank,
        IDENTITY.incarnation,
        CountingSide.DESTINATION,
        steps,
        np.arange(2 * 3 * 3).reshape(2, 3, 3),
    )
    wire = encode_rank_message(report)
    for name, value in changes.items():
        setattr(wire.load_report, name, value)
    return wire
