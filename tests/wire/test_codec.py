"""Every message keeps its content on the wire; other input is a PeerViolation with the numbers."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from evenkeel_moe.errors import PeerViolation, Reason
from evenkeel_moe.model.ids import Epoch, Generation, PlanId, is_deployment_id
from evenkeel_moe.model.load import STEP
from evenkeel_moe.model.plan import Wave, WaveKey
from evenkeel_moe.model.texts import printable_line
from evenkeel_moe.protocol import control_messages as ctl
from evenkeel_moe.protocol import messages as m
from evenkeel_moe.protocol.leader.control import DeploymentControl
from evenkeel_moe.protocol.terms import MAX_TERM, MAX_TERM_RISE
from evenkeel_moe.v1 import agent_pb2, telemetry_pb2
from evenkeel_moe.v1 import common_pb2 as pb
from evenkeel_moe.wire import link
from evenkeel_moe.wire.from_rank import decode_rank_message, encode_rank_message
from evenkeel_moe.wire.limits import MAX_HELLO_BYTES, most_message_bytes
from evenkeel_moe.wire.reports import MAX_REPORT_STEPS
from evenkeel_moe.wire.to_rank import decode_controller_message, encode_controller_message
from tests.wire import strategies as gen
from tests.wire.strategies import IDENTITY
from tests.wire.wires import HELLO, make_report, over_the_wire, refusal, same

KEY = WaveKey(Generation("g"), PlanId("p"), 0, 1, Epoch(6))


@given(gen.rank_messages)
def test_a_rank_message_keeps_its_content(message):
    assert same(decode_rank_message(over_the_wire(encode_rank_message(message)), HELLO), message)


@given(gen.hellos)
def test_a_hello_keeps_its_content(hello):
    assert decode_rank_message(over_the_wire(encode_rank_message(hello)), None) == hello


@given(gen.controller_messages)
def test_a_controller_message_keeps_its_content(message):
    assert same(
        decode_controller_message(over_the_wire(encode_controller_message(message))), message
    )


def mutate(data: bytes, cuts):
    mutated = bytearray(data)
    for position, value in cuts:
        if mutated:
            mutated[position % len(mutated)] = value
    return bytes(mutated)


cuts = st.lists(st.tuples(st.integers(0, 4096), st.integers(0, 255)), min_size=1, max_size=6)


@settings(max_examples=300)
@given(st.one_of(gen.rank_messages, gen.hellos), cuts, st.booleans())
def test_a_damaged_rank_message_is_refused_or_read_but_never_crashes(message, cuts, greeted):
    damaged = mutate(encode_rank_message(message).SerializeToString(), cuts)
    try:
        decode_rank_message(agent_pb2.RankMessage.FromString(damaged), HELLO if greeted else None)
    except (DecodeError, PeerViolation):
        pass


@settings(max_examples=200)
@given(gen.controller_messages, cuts)
def test_a_damaged_controller_message_is_refused_or_read_but_never_crashes(message, cuts):
    damaged = mutate(encode_controller_message(message).SerializeToString(), cuts)
    try:
        decode_controller_message(agent_pb2.ControllerMessage.FromString(damaged))
    except (DecodeError, PeerViolation):
        pass


@settings(max_examples=200)
@given(st.binary(max_size=300))
def test_noise_never_crashes(data):
    doors: list[tuple[Any, Any]] = [
        (agent_pb2.RankMessage, lambda message: decode_rank_message(message, None)),
        (agent_pb2.RankMessage, lambda message: decode_rank_message(message, HELLO)),
        (agent_pb2.ControllerMessage, decode_controller_message),
    ]
    for message_type, decode in doors:
        try:
            decode(message_type.FromString(data))
        except (DecodeError, PeerViolation):
            pass


# --- one fault at a time ---------------------------------------------------------------------


def test_a_stream_starts_with_one_hello_and_has_no_second():
    assert "got load_report" in str(refusal(make_report(), None))
    assert "got hello" in str(refusal(encode_rank_message(HELLO)))
    assert "got nothing" in str(refusal(agent_pb2.RankMessage(), None))
    assert "without a body" in str(refusal(agent_pb2.RankMessage()))
    with pytest.raises(PeerViolation, match="without a body"):
        decode_controller_message(agent_pb2.ControllerMessage())


@pytest.mark.parametrize(
    ("changes", "words", "reason"),
    [
        ({"num_layers": 0}, "num_layers is 0", Reason.WRONG_SHAPE),
        ({"top_k": 9}, "top_k 9 exceeds 8", Reason.WRONG_SHAPE),
        ({"slots_per_rank": 1}, "cannot hold 8 experts", Reason.WRONG_SHAPE),
        ({"num_expert_groups": 3}, "do not divide", Reason.WRONG_SHAPE),
        ({"num_layers": 1 << 30}, "cells, at most", Reason.WRONG_SHAPE),
        ({"num_layers": 1025}, "at most 1024 layers", Reason.WRONG_SHAPE),
        ({"num_ranks": 1}, "rank 1 of 1 ranks", Reason.WRONG_SHAPE),
        ({"bytes_per_expert": 1 << 63}, "bytes_per_expert is", Reason.MALFORMED),
    ],
)
def test_an_impossible_shape_is_refused_with_its_numbers(changes, words, reason):
    wire = encode_rank_message(HELLO)
    if "num_ranks" in changes:
        wire.hello.shape.slots_per_rank = 12
        wire.hello.shape.pool_slots_per_rank = 36
    for name, value in changes.items():
        setattr(wire.hello.shape, name, value)
    error = refusal(wire, None)
    assert words in str(error)
    assert error.reason is reason


def test_rank_out_of_range_is_refused():
    wire = encode_rank_message(HELLO)
    wire.hello.identity.rank = 4
    assert refusal(wire, None).reason is Reason.WRONG_SHAPE


@pytest.mark.parametrize("text", ["", "Demo", "-a", "a/b", "a" * 64, "a{b}", "ä"])
def test_deployment_ids_that_would_not_be_safe_in_keys_are_refused(text):
    assert not is_deployment_id(text)
    wire = encode_rank_message(HELLO)
    wire.hello.identity.deployment = text
    assert refusal(wire, None).reason is Reason.MALFORMED


def test_texts_and_lists_of_a_hello_are_bounded():
    wire = encode_rank_message(HELLO)
    wire.hello.node = "n" * 257
    assert "257 characters" in str(refusal(wire, None))
    wire = encode_rank_message(HELLO)
    wire.hello.capabilities.extend(["c"] * 65)
    assert "capabilities" in str(refusal(wire, None))
    wire = encode_rank_message(HELLO)
    wire.hello.identity.generation = ""
    assert "generation is empty" in str(refusal(wire, None))


def test_a_message_with_the_identity_of_another_rank_is_refused():
    other = dataclasses.replace(IDENTITY, incarnation=18)
    refused = m.TermRefused(other, m.Leader("a", 3))
    assert refusal(encode_rank_message(refused)).reason is Reason.MALFORMED


def make_state(**changes):
    values = {
        "identity": IDENTITY,
        "state": m.ParticipantState.IDLE,
        "wave": None,
        "epoch": 1,
        "placement_digest": "d",
        "weights_version": 1,
        "drained": True,
        "last_wave": None,
        "last_outcome": None,
    }
    return encode_rank_message(m.RankState(**{**values, **changes}))


def test_a_rank_state_must_fit_the_declared_shape():
    wire = make_state(checksums=(1, 2, 3))
    assert "3 checksums, layers x experts = 24" in str(refusal(wire))
    wire = make_state()
    wire.rank_state.placement.CopyFrom(
        pb.PlacementMap(
            num_layers=1,
            num_slots=2,
            num_ranks=1,
            num_logical_experts=2,
            physical_to_logical=b"\0" * 8,
        )
    )
    assert refusal(wire).reason is Reason.WRONG_SHAPE
    wire.rank_state.placement.physical_to_logical = b"\0" * 7
    assert refusal(wire).reason is Reason.BAD_LENGTH
    wire.rank_state.placement.physical_to_logical = np.array([0, 2], "<i4").tobytes()
    assert refusal(wire).reason is Reason.EXPERT_OUT_OF_RANGE
    wire = make_state()
    wire.rank_state.state = 0
    assert "state 0 is unknown" in str(refusal(wire))


def test_a_no_vote_needs_a_known_reason():
    key = pb.WaveKey(generation="g", plan_id="p")
    wire = agent_pb2.RankMessage(vote=agent_pb2.Vote(wave=key, reason="mood"))
    assert "'mood' is not a known reason" in str(refusal(wire))
    wire = agent_pb2.RankMessage(abort_answer=agent_pb2.AbortAnswer(wave=key))
    assert "outcome 0 is unknown" in str(refusal(wire))


def prepare():
    wave = Wave(0, (1,), np.zeros((1, 4), np.int32), ())
    return encode_controller_message(m.Prepare(m.Leader("a", 1), KEY, Epoch(0), wave, (), 5.0))


def test_a_term_the_store_cannot_count_on_from_is_refused():
    """A rank could otherwise raise the stored term so far that adding 1 no longer changes it."""
    hello = encode_rank_message(HELLO)
    hello.hello.highest_term = MAX_TERM
    decode_rank_message(hello, None)
    hello.hello.highest_term = MAX_TERM + 1
    with pytest.raises(PeerViolation, match="highest_term is 4503599627370497"):
        decode_rank_message(hello, None)


@given(gen.highest_terms, st.integers(1, MAX_TERM - MAX_TERM_RISE))
def test_leader_never_rises_to_a_term_that_ranks_refuse(named, term):
    """R2: whatever a Hello names, the next term is one that the ranks' codec takes."""
    hello = dataclasses.replace(HELLO, highest_term=named)
    heard = decode_rank_message(encode_rank_message(hello), None)
    control = DeploymentControl(hello.identity.deployment)
    control.handle(ctl.LeaseAcquired(m.Leader("a", term), ctl.StoredRecords()), 0.0)
    assert isinstance(heard, m.Hello)
    identity = hello.identity
    event = ctl.FromRank(identity.rank, identity.incarnation, 1, heard)
    raised = [a.at_least for a in control.handle(event, 0.0) if isinstance(a, ctl.RaiseTerm)]
    assert bool(raised) is (term < named <= term + MAX_TERM_RISE)
    question = m.QueryState(m.Leader("a", raised[0] + 1 if raised else term))
    assert decode_controller_message(encode_controller_message(question)) == question


ONE_TRANSFER = pb.Batch(transfers=[pb.Transfer()])
DAMAGES: dict[str, Any] = {
    "checksums": lambda prepare: prepare.checksums.append(1),
    "rows": lambda prepare: setattr(prepare.body, "rows", b"\0" * 15),
    "slots": lambda prepare: setattr(prepare.body, "num_slots", 1 << 31),
    "layers": lambda prepare: prepare.body.MergeFrom(pb.Wave(layers=[1], rows=b"\0" * 32)),
    "transfer": lambda prepare: prepare.body.batches.add().transfers.add(src_slot=4),
    "number": lambda prepare: prepare.MergeFrom(
        agent_pb2.Prepare(body=pb.Wave(batches=[ONE_TRANSFER] * 5), checksums=[0] * 5)
    ),
    "batches": lambda prepare: [prepare.body.batches.add() for _ in range(5)],
    "term": lambda prepare: setattr(prepare.leader, "term", 0),
    "high term": lambda prepare: setattr(prepare.leader, "term", MAX_TERM + 1),
    "deadline": lambda prepare: setattr(prepare, "batch_deadline_s", 0),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_prepare_with_one_fault_is_refused(damage):
    wire = prepare()
    decode_controller_message(wire)
    damage(wire.prepare)
    with pytest.raises(PeerViolation):
        decode_controller_message(wire)


def test_a_flow_without_steps_is_refused():
    for changes in ({"stride": 0}, {"max_steps_per_report": 0}, {"report_interval_s": 0.0}):
        flow = telemetry_pb2.FlowControl(report_interval_s=1.0, stride=1, max_steps_per_report=8)
        for name, value in changes.items():
            setattr(flow, name, value)
        with pytest.raises(PeerViolation):
            decode_controller_message(agent_pb2.ControllerMessage(flow_control=flow))
    with pytest.raises(PeerViolation, match="outcome 0"):
        decode_controller_message(
            agent_pb2.ControllerMessage(registration=agent_pb2.Registration())
        )


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("tile", "stairs", "slope"),
    [
        (0, (1.0,), 0.0),
        (64, (), 0.0),
        (64, (2.0, 1.0), 0.0),
        (64, (1.0,), NAN),
        (64, (-1.0,), 0.0),
        (64, (1.0, 1e308), 0.0),
        (64, (1.0,), 1e308),
        (64, (1.0,) * 5000, 0.0),
    ],
)
def test_curves_that_planners_cannot_use_are_refused(tile, stairs, slope):
    refusal(over_the_wire(encode_rank_message(link.CostCurve(tile, stairs, slope))))


COST = link.ReplicaCost(1e-5, 1e-7, 1e-6, 0.0, 0.02, 1.7e9)
HOSTILE: list[tuple[Any, str, float]] = [
    (COST, name, value)
    for name in ("fixed_s", "s_per_replica", "read_s", "fit_error")
    for value in (-1e-9, NAN, INF, 1e308)
]
HOSTILE += [
    (link.CostCurve(64, (1.0,), 0.0, 0.1, 0.1), name, value)
    for name in ("fit_error", "line_error")
    for value in (-1e-9, NAN, INF, 1e308)
]
HOSTILE += [(COST, "s_per_token", value) for value in (0.0, 5e-324, 1e6)]
HOSTILE += [
    (link.KvCache(1, 0), "bytes_per_token", value) for value in (0, (1 << 40) + 1, (1 << 64) - 1)
]
HOSTILE += [(link.KvCache(1, 0), "free_bytes", value) for value in ((1 << 53) + 1, (1 << 64) - 1)]
HOSTILE += [(link.DeviceClock(0.9), "ratio", value) for value in (0.0, -1.0, 2.1, NAN, INF)]


@pytest.mark.parametrize(("told", "field", "value"), HOSTILE)
def test_a_number_that_planners_cannot_use_is_refused(told, field, value):
    message = encode_rank_message(told)
    setattr(getattr(message, str(message.WhichOneof("body"))), field, value)
    assert f"{field} is {value}" in str(refusal(over_the_wire(message)))


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ((10**6, 0, 0, 0), "1000000 slots moved, a rank has"),
        ((2, 2, 1, 0), "3 answers and 0 blind ones of 2 moved slots"),
        ((2, 0, 0, 3), "0 answers and 3 blind ones of 2 moved slots"),
    ],
)
def test_answers_that_no_rank_can_have_are_refused(told, words):
    answers = m.MovedAnswers(WaveKey(Generation("g-1"), PlanId("p"), 0, 1), *told)
    assert words in str(refusal(over_the_wire(encode_rank_message(answers))))


def test_a_rank_of_an_earlier_version_tells_no_device_and_no_shared_experts():
    message = encode_rank_message(HELLO)
    for field in ("device", "weight_format"):
        message.hello.ClearField(field)
    message.hello.shape.ClearField("shared_experts")
    hello = decode_rank_message(over_the_wire(message), None)
    assert isinstance(hello, m.Hello)
    assert (hello.device, hello.weight_format, hello.shape.shared_experts) == ("", "", None)


@pytest.mark.parametrize("shared", [-1.0, NAN, INF])
def test_hostile_work_of_shared_experts_is_refused(shared):
    message = encode_rank_message(HELLO)
    message.hello.shape.shared_experts = shared
    assert "shared_experts" in str(refusal(over_the_wire(message), None))


# --- control characters ---------------------------------------------------------------------------


STEERING = "\x1b]52;c;cm0=\x1b\\ \x07 \x7f \x9b2J \u202e \u2066 \u200f"
"""Sets the clipboard of a terminal, clears it, and turns the direction of writing around."""


@pytest.mark.parametrize(
    "field",
    [
        "node",
        "gpu_uuid",
        "placement_digest",
        "checksums_digest",
        "gate_digest",
        "device",
        "weight_format",
        "dispatch",
    ],
)
@pytest.mark.parametrize(
    "char", [*"\x1b\x07\x7f\x9b\u202e\u2066\u200f\u2028\u2029\u200b\ufe0f", 3 * "\u0301"]
)
def test_control_characters_in_a_name_of_a_hello_are_refused(field, char):
    wire = encode_rank_message(HELLO)
    setattr(wire.hello, field, f"n{char}1")
    told = str(refusal(wire, None))
    assert told.startswith(f"{field} ") and "control characters" in told
    assert printable_line(told) == told


def test_control_characters_in_a_capability_are_refused():
    wire = encode_rank_message(HELLO)
    wire.hello.capabilities.append("\x1b[2J")
    assert "control characters" in str(refusal(wire, None))


def test_control_characters_in_what_went_wrong_are_replaced_and_the_rest_is_kept():
    heartbeat = link.Heartbeat(1, 2, 3, f"out of memory\n{STEERING}.")
    no = m.Vote(KEY, False, Reason.CHECKSUM_MISMATCH, heartbeat.trouble)
    answer: Any = decode_rank_message(over_the_wire(encode_rank_message(heartbeat)), HELLO)
    vote: Any = decode_rank_message(over_the_wire(encode_rank_message(no)), HELLO)
    assert vote.detail == answer.trouble
    assert answer.trouble.isprintable()
    assert answer.trouble.startswith("out of memory \ufffd]52;c;cm0=\ufffd\\ \ufffd ")
    assert answer.trouble.endswith(".") and len(answer.trouble) == len(heartbeat.trouble)


# --- The largest right message of a rank fits its limit, and little more does ---------------------


@given(gen.rank_messages)
def test_every_message_of_a_rank_fits(message):
    assert encode_rank_message(message).ByteSize() <= most_message_bytes(gen.SHAPE)


@given(gen.hellos)
def test_every_hello_fits(hello):
    assert encode_rank_message(hello).ByteSize() <= MAX_HELLO_BYTES


def test_largest_report_fits():
    shape = gen.SHAPE
    step = STEP.itemsize + 4 * shape.num_layers * shape.num_logical_experts
    assert MAX_REPORT_STEPS * step < most_message_bytes(shape) < MAX_REPORT_STEPS * step + (1 << 19)
