"""Weighs replicas against the KV cache: what each number of replicas takes and gives.

A replica takes memory that the KV cache loses, so that fewer sequences run at once; it gives
balance, so that a step is shorter. The estimate of goodput, relative to the present replicas:

    goodput / goodput now = (batch / batch now) / (step time / step time now)
    step time / step time now = 1 - moe_share x gain
    batch = floor(kv_tokens / tokens_per_sequence), or kv_tokens where no length is told
    kv_tokens = floor((kv_free_bytes - extra_bytes_per_rank) / kv_bytes_per_token), at least 0

Assumptions:

- The engine gives all memory that is left to the KV cache, so that every byte of a replica comes
  from it. The rank with the fewest KV tokens bounds the batch.
- Requests are always waiting, and each holds `tokens_per_sequence` tokens of KV cache.
- Step time is MoE time plus a rest. Replicas change only MoE time, by `gain` under the cost model.
- The step does not get longer with the batch. This holds where reading memory dominates, as in
  decode; elsewhere the effect of the KV cache is smaller than estimated.
- Where `moe_share`, MoE time / step time, is unknown, the estimate is the interval from 0 to 1.

Source of the question: CRAFT sections 5.2 and 5.3. The formula is ours: CRAFT measures goodput.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from evenkeel_moe.errors import InvalidInput
from evenkeel_moe.model.unknown import NanIfUnknown
from evenkeel_moe.planning.decision.replica_levels import (
    CraftFactors,
    CraftLevel,
    Redundancy,
    ReplicaLevel,
    extra_replicas,
)


@dataclass(frozen=True, slots=True)
class KvMemory:
    """The KV cache of the rank that holds the fewest tokens, with the present replicas."""

    bytes_per_token: int
    """Bytes of one token, over all layers; at least 1."""
    free_bytes: int
    """Bytes of the cache while no sequence runs."""

    def __post_init__(self) -> None:
        if self.bytes_per_token < 1:
            raise InvalidInput(f"a KV token has {self.bytes_per_token} bytes, at least 1 is needed")
        if self.free_bytes < 0:
            raise InvalidInput(f"the KV cache has {self.free_bytes} bytes, must not be negative")

    def tokens(self, extra_bytes: int = 0) -> int:
        """Return the tokens that fit after replicas took `extra_bytes` more; at least 0."""
        return max(0, self.free_bytes - extra_bytes) // self.bytes_per_token


@dataclass(frozen=True, slots=True)
class TradeoffRow:
    """One number of extra replicas, with its KV cache. Null is unknown, never zero."""

    rule: str
    """`uniform`: the same number in every layer. `craft`: each layer its own, in pooled slots."""
    level: int
    """Replicas per layer if uniform; for craft R, the replicas of a rank over all layers."""
    replicas: int
    """Replicas over all layers and ranks."""
    present: bool
    """True for the present number, to which gain and goodput are relative."""
    balancedness: float | None
    gain: NanIfUnknown
    """Share of predicted MoE time saved."""
    extra_bytes_per_rank: int | None
    kv_tokens_lost: int | None
    """Tokens of a rank's KV cache that the replicas take; negative if they give some back."""
    kv_tokens: int | None
    """Tokens that fit then."""
    sequences: int | None
    """Sequences of the length told that fit then."""
    goodput_lower: float | None
    """Estimated change of goodput as a share; the formula is in docs/policies.md."""
    goodput_upper: float | None
    """The same as the lower one if the MoE share is known."""

    @property
    def name(self) -> str:
        """The number of extra replicas in words."""
        if self.rule == "craft":
            return f"CRAFT with R = {self.level}"
        return f"{self.level} in every layer"


@dataclass(frozen=True, slots=True)
class ReplicaTradeoff:
    """Replicas against KV cache: all numbers, and the sentences that sum them up."""

    rows: tuple[TradeoffRow, ...]
    """Uniform levels first, then CRAFT's; each in rising order."""
    words: str
    """The advice if the KV cache does not limit the batch and if it does, and why."""
    craft_words: str
    """Sentences that explain CRAFT's R and say which R balance and free memory allow."""
    kv: KvMemory | None
    """Null unless every rank told its KV cache."""
    tokens_per_sequence: int | None
    moe_share: float | None


def kv_tradeoff(
    redundancy: Redundancy,
    kv: KvMemory | None,
    tokens_per_sequence: int | None = None,
    moe_share: float | None = None,
) -> ReplicaTradeoff:
    """Weigh every level of a comparison.

    Args:
        redundancy: the levels, with their gains and bytes.
        kv: the KV cache of the rank that bounds the batch; None if unknown.
        tokens_per_sequence: tokens that a sequence holds in the cache, at least 1; None if unknown.
        moe_share: MoE time / step time in 0..1; None takes that of the comparison, if it has one.

    Raises:
        InvalidInput: a length below 1, or a share outside 0..1.
    """
    share = redundancy.moe_share if moe_share is None else moe_share
    if tokens_per_sequence is not None and tokens_per_sequence < 1:
        raise InvalidInput(f"a sequence has {tokens_per_sequence} tokens, at least 1 is needed")
    if share is not None and not 0.0 <= share <= 1.0:
        raise InvalidInput(f"the MoE share of a step is {share}, must lie in 0..1")
    weigh = _Weigher(kv, tokens_per_sequence, (0.0, 1.0) if share is None else (share, share))
    rows = [
        weigh.row(
            "uniform",
            level.replicas_per_layer,
            level.replicas_per_layer * redundancy.num_layers,
            level,
            present=level.replicas_per_layer == redundancy.present,
        )
        for level in redundancy.levels
    ]
    rows += [
        weigh.row("craft", craft.replication_factor, craft.replicas, craft)
        for craft in redundancy.craft
    ]
    words = _words(rows, redundancy, kv, tokens_per_sequence, share)
    craft_words = _craft_words(redundancy.craft_factors)
    return ReplicaTradeoff(tuple(rows), words, craft_words, kv, tokens_per_sequence, share)


@dataclass(frozen=True, slots=True)
class _Weigher:
    kv: KvMemory | None
    tokens_per_sequence: int | None
    shares: tuple[float, float]
    """The least and the greatest MoE share of a step."""

    def row(
        self,
        rule: str,
        level: int,
        replicas: int,
        scored: ReplicaLevel | CraftLevel,
        *,
        present: bool = False,
    ) -> TradeoffRow:
        """Return the row of one level."""
        tokens = lost = sequences = lower = upper = None
        gain, extra = scored.gain, scored.extra_bytes_per_rank
        if self.kv is not None and extra is not None:
            now, tokens = self.kv.tokens(), self.kv.tokens(extra)
            lost, each = now - tokens, self.tokens_per_sequence or 1
            batch, batch_now = tokens // each, now // each
            sequences = None if self.tokens_per_sequence is None else batch
            step = [1.0 - share * gain for share in self.shares]
            if batch_now > 0 and all(time > 0 for time in step):
                changes = [batch / batch_now / time - 1.0 for time in step]
                lower, upper = min(changes), max(changes)
        return TradeoffRow(
            rule,
            level,
            replicas,
            present,
            scored.balancedness,
            gain,
            extra,
            lost,
            tokens,
            sequences,
            lower,
            upper,
        )


def goodput_words(lower: float | None, upper: float | None) -> str:
    """Return an estimated change of goodput as text; `unknown` without one."""
    if lower is None or upper is None:
        return "unknown"
    shown = f"{lower:+.1%}", f"{upper:+.1%}"
    return shown[0] if shown[0] == shown[1] else f"{shown[0]} to {shown[1]}"


def _words(
    rows: Sequence[TradeoffRow],
    redundancy: Redundancy,
    kv: KvMemory | None,
    tokens_per_sequence: int | None,
    share: float | None,
) -> str:
    """Return the advice with and without a limit by the KV cache, and the reason for the former."""
    verb = "keep" if redundancy.advised == redundancy.present else "take"
    advice = f"{verb} {extra_replicas(redundancy.advised, 'in every layer')}"
    unlimited = f"If the KV cache does not limit the batch, {advice}; if it does,"
    if kv is None:
        return (
            f"{unlimited} the best number is unknown, as bytes per KV token and free KV bytes are"
            " not known."
        )
    known = [row for row in rows if row.goodput_lower is not None]
    if not known:
        why = (
            "the size of an expert is not known"
            if all(row.extra_bytes_per_rank is None for row in rows)
            else f"the present KV cache of {kv.tokens()} tokens holds no sequence"
            if kv.tokens() < (tokens_per_sequence or 1)
            else "predicted MoE time is not known"
        )
        return f"{unlimited} the best number is unknown: {why}."
    best = max(known, key=lambda row: (row.goodput_lower or 0.0, row.present, -row.replicas))
    basis = (
        "whatever part of a step is MoE time"
        if share is None
        else f"with MoE time as {share:.0%} of a step"
    )
    lead = (
        f"{advice.capitalize()}, whether or not the KV cache limits the batch."
        if (best.rule, best.level) == ("uniform", redundancy.advised)
        else f"{unlimited} {'keep' if best.present else 'take'} {best.name}."
    )
    if best.present:
        return (
            f"{lead} No other number of replicas has a higher estimated goodput for sure, {basis}."
        )
    lost = best.kv_tokens_lost or 0
    fit = "" if best.sequences is None else f", and {best.sequences} sequences fit a rank"
    return (
        f"{lead} That has the highest estimated goodput:"
        f" {goodput_words(best.goodput_lower, best.goodput_upper)} against the present number,"
        f" {basis}; a rank's KV cache holds {abs(lost)} tokens {'less' if lost >= 0 else 'more'}"
        f"{fit}."
    )


def _craft_words(factors: CraftFactors | None) -> str:
    if factors is None:
        return "The number of replicas that CRAFT would choose is unknown."
    budget = (
        "CRAFT gives each layer its own number of extra replicas, so it needs slots pooled over"
        " layers. It has one budget, R: the extra replicas that a rank holds, counted over all"
        " layers."
    )
    if factors.per_replica_gain == 0:
        return f"{budget} No replica gains balance here, so R = 0 is enough."
    memory, knee = factors.memory, factors.knee
    bend = f"Balance gains much up to R = {knee}, and little beyond it"
    most = f"R = {factors.per_replica_gain} gains most for each replica"
    if memory is None:
        return f"{budget} {bend}. {most}, and how many fit in the free memory is unknown."
    return f"{budget} {bend}. {most}, and the free memory holds R = {memory}."
