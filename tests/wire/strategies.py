"""Strategies for every message of either side."""

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from evenkeel_moe.errors import Reason
from evenkeel_moe.model.ids import DeploymentId, Epoch, EpRank, Generation, PlanId
from evenkeel_moe.model.load import (
    MAX_COMPUTE_S,
    CountingSide,
    LoadReport,
    Phase,
    StepMeta,
    step_table,
)
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.model.plan import Transfer, Wave, WaveKey
from evenkeel_moe.model.texts import printable_line
from evenkeel_moe.model.topology import ModelShape
from evenkeel_moe.protocol import messages as m
from evenkeel_moe.protocol.terms import MAX_TERM
from evenkeel_moe.wire import link

SHAPE = ModelShape(
    3, 8, 4, 3, 2, 4096, num_expert_groups=2, pool_slots_per_rank=8, shared_experts=1.5
)
IDENTITY = m.RankIdentity(DeploymentId("demo"), EpRank(1), Generation("g-1"), 17)

counts = st.integers(0, (1 << 63) - 1)
highest_terms = st.integers(0, MAX_TERM)
seconds = st.floats(0, 1e6)
step_seconds = st.floats(0, MAX_COMPUTE_S)
positive_seconds = st.floats(1e-6, 1e6)
printable = st.characters(codec="utf-8").filter(lambda char: printable_line(char) == char)
short_text = st.text(printable, max_size=40)
name = st.text(printable, min_size=1, max_size=40)
reasons = st.sampled_from(Reason)
checksums64 = st.integers(0, (1 << 64) - 1)

leaders = st.builds(m.Leader, name, st.integers(1, 1 << 40))
keys = st.builds(
    WaveKey,
    name.map(Generation),
    name.map(PlanId),
    st.integers(0, 1 << 20),
    st.integers(0, 1 << 40),
)


@st.composite
def placements(draw):
    phy2log = draw(
        hnp.arrays(
            np.int32,
            (SHAPE.num_layers, SHAPE.num_slots),
            elements=st.integers(-1, SHAPE.num_logical_experts - 1),
        )
    )
    return Placement(phy2log, SHAPE.num_ranks, SHAPE.num_logical_experts)


@st.composite
def waves(draw):
    layers = tuple(draw(st.lists(st.integers(0, 60), min_size=1, max_size=4, unique=True)))
    rows = draw(hnp.arrays(np.int32, (len(layers), SHAPE.num_slots), elements=st.integers(-1, 300)))
    transfer = st.builds(
        Transfer,
        st.sampled_from(layers),
        st.integers(0, 300),
        st.integers(0, SHAPE.num_slots - 1),
        st.integers(0, SHAPE.num_slots - 1),
        st.integers(0, 1 << 40),
    )
    batches = draw(st.lists(st.lists(transfer, max_size=3).map(tuple), max_size=3).map(tuple))
    return Wave(draw(st.integers(0, 1000)), layers, rows, batches)


@st.composite
def reports(draw, shape=SHAPE):
    side = draw(st.sampled_from(CountingSide))
    numbers = sorted(draw(st.sets(st.integers(0, (1 << 62) - 1), max_size=5)))
    steps = step_table(
        StepMeta(
            number,
            draw(st.integers(0, 1 << 40)),
            draw(st.sampled_from(Phase)),
            draw(st.integers(0, (1 << 31) - 1)),
            draw(st.booleans()),
            draw(st.none() | step_seconds),
        )
        for number in numbers
    )
    width = shape.slots_per_rank if side is CountingSide.DESTINATION else shape.num_logical_experts
    values = draw(
        hnp.arrays(
            np.int32, (len(steps), shape.num_layers, width), elements=st.integers(0, (1 << 31) - 1)
        )
    )
    return LoadReport(
        IDENTITY.deployment,
        IDENTITY.generation,
        IDENTITY.rank,
        IDENTITY.incarnation,
        side,
        steps,
        values,
        draw(st.integers(0, 1 << 40)),
    )


identities = st.builds(
    m.RankIdentity,
    st.from_regex(r"[a-z0-9][a-z0-9._-]{0,62}", fullmatch=True).map(DeploymentId),
    st.integers(0, SHAPE.num_ranks - 1).map(EpRank),
    name.map(Generation),
    counts,
)
hellos = st.builds(
    m.Hello,
    identity=identities,
    shape=st.just(SHAPE),
    node=short_text,
    gpu_uuid=short_text,
    epoch=counts.map(Epoch),
    placement_digest=short_text,
    weights_version=counts,
    checksums_digest=short_text,
    free_bytes=counts,
    staging_bytes=counts,
    gate_digest=short_text,
    capabilities=st.frozensets(short_text, max_size=4),
    highest_term=highest_terms,
    device=short_text,
    weight_format=st.sampled_from(["", "bf16", "fp8", "a type of later versions"]),
    dispatch=st.sampled_from(["", "even", "a rule of later versions"]),
    slots_stay_filled=st.booleans(),
    lineage=st.none()
    | st.builds(
        m.Lineage,
        generation=short_text.filter(bool).map(Generation),
        rank=st.none() | st.integers(0, 9).map(EpRank),
    ),
)


@st.composite
def rank_states(draw):
    cells = SHAPE.num_layers * SHAPE.num_logical_experts
    ended = draw(st.none() | st.tuples(keys, st.sampled_from(m.WaveOutcome)))
    return m.RankState(
        identity=IDENTITY,
        state=draw(st.sampled_from(m.ParticipantState)),
        wave=draw(st.none() | keys),
        epoch=Epoch(draw(counts)),
        placement_digest=draw(short_text),
        weights_version=draw(counts),
        drained=draw(st.booleans()),
        last_wave=ended[0] if ended else None,
        last_outcome=ended[1] if ended else None,
        placement=draw(st.none() | placements()),
        checksums=draw(
            st.none() | st.lists(checksums64, min_size=cells, max_size=cells).map(tuple)
        ),
        highest_term=draw(highest_terms),
        step=draw(counts),
        query=draw(counts),
    )


no_votes = st.builds(m.Vote, keys, st.just(False), reasons, short_text)
yes_votes = st.builds(m.Vote, keys, st.just(True), detail=short_text)
stairs = st.lists(step_seconds, min_size=1, max_size=20).map(lambda values: tuple(sorted(values)))
rank_messages = st.one_of(
    reports(),
    st.builds(link.Heartbeat, counts, counts, counts, short_text),
    st.builds(
        link.CostCurve,
        st.integers(1, 4096),
        stairs,
        step_seconds,
        st.none() | step_seconds,
        st.none() | step_seconds,
    ),
    st.builds(
        link.ReplicaCost,
        step_seconds,
        st.floats(1e-15, MAX_COMPUTE_S),
        step_seconds,
        step_seconds,
        step_seconds,
        seconds,
    ),
    st.builds(link.KvCache, st.integers(1, 1 << 40), st.integers(0, 1 << 53)),
    st.builds(link.DeviceClock, st.floats(0, 2, exclude_min=True), short_text),
    no_votes,
    yes_votes,
    st.builds(m.Ack, keys, counts.map(Epoch), short_text, seconds),
    st.builds(
        m.AbortAnswer, keys, counts.map(Epoch), st.sampled_from(m.WaveOutcome), st.booleans()
    ),
    rank_states(),
    st.builds(m.TermRefused, st.just(IDENTITY), leaders),
    st.builds(m.StagingProgress, keys, counts, counts),
    st.builds(m.MovedAnswers, keys, st.just(2), *[st.integers(0, 1)] * 2, st.integers(0, 2)),
)


@st.composite
def prepares(draw):
    body = draw(waves())
    size = len(body.transfers)
    return m.Prepare(
        draw(leaders),
        draw(keys),
        Epoch(draw(counts)),
        body,
        tuple(draw(st.lists(checksums64, min_size=size, max_size=size))),
        draw(positive_seconds),
        draw(seconds),
    )


flows = st.builds(
    link.FlowControl,
    positive_seconds,
    st.integers(1, 1 << 20),
    counts,
    st.integers(1, 1 << 20),
)
controller_messages = st.one_of(
    prepares(),
    st.builds(m.Commit, leaders, keys),
    st.builds(m.Abort, leaders, keys),
    st.builds(m.QueryState, leaders, st.booleans(), st.booleans(), counts),
    flows,
    st.builds(link.ReportAck, st.none() | counts, st.integers(0, 1 << 20), st.none() | reasons),
    st.builds(link.NotLeader, short_text, short_text, seconds),
    st.builds(
        link.Registration,
        st.sampled_from(link.RegistrationOutcome),
        positive_seconds,
        positive_seconds,
        flows,
        st.none() | reasons,
        short_text,
        st.none() | leaders,
        st.none() | counts,
    ),
)
