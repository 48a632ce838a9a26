"""Compares the KV tokens that another number of slots was to leave with those an engine reports.

Slots of experts and KV cache share the memory of a rank. So a group that starts with other slots is
promised the KV cache of the start before, less the bytes of the slots that were added: the
arithmetic of the recommendation and of the comparison of widths.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from evenkeel_moe.errors import InvalidInput
from evenkeel_moe.model.topology import ModelShape
from evenkeel_moe.planning.decision.kv_tradeoff import KvMemory


@dataclass(frozen=True, slots=True)
class KvPromise:
    """KV tokens of the rank that holds the fewest, as promised and as reported."""

    slots_per_rank_before: int
    """Slots of a rank in one layer at the start before."""
    slots_per_rank: int
    promised_tokens: int
    """Tokens that the slots were to leave for a rank's KV cache."""
    reported_tokens: int | None
    """Null until every rank told its KV cache."""
    ratio: float | None
    """Reported / promised; null where either is not known or nothing was promised."""
    words: str


@dataclass(frozen=True, slots=True)
class KvReport:
    """The smallest KV cache of a group's ranks, and the shape they had it with."""

    shape: ModelShape
    kv: KvMemory


@dataclass(frozen=True, slots=True)
class KvHistory:
    """The newest report of a deployment, and the last one before it with other slots."""

    newest: KvReport | None = None
    before: KvReport | None = None

    def with_report(self, report: KvReport) -> "KvHistory":
        """Return the history with a report of the present start."""
        return KvHistory(report, self._base(report.shape))

    def promise(self, shape: ModelShape, told: KvMemory | None) -> KvPromise | None:
        """Return what was promised to the present start.

        Args:
            shape: of the group.
            told: the smallest KV cache of its ranks; None until all of them told theirs.

        Returns:
            None without an earlier start of the same model with other slots of a known size, or
            where slots are pooled: experts and KV cache may then be in one pool.
        """
        base = self._base(shape)
        if base is None or base.shape.pooled or shape.pooled:
            return None
        now, was = shape.expert_bytes_per_rank, base.shape.expert_bytes_per_rank
        if now is None or was is None:
            return None
        promised = base.kv.tokens(now - was)
        reported = None if told is None else told.tokens()
        ratio = None if reported is None or not promised else reported / promised
        return KvPromise(
            base.shape.slots_per_rank,
            shape.slots_per_rank,
            promised,
            reported,
            ratio,
            _words(base, shape, told, promised, ratio),
        )

    def _base(self, shape: ModelShape) -> KvReport | None:
        """Return the last report of the same model with other slots."""
        if self.newest is None or _model(self.newest.shape) != _model(shape):
            return None
        return self.before if _slots(self.newest.shape) == _slots(shape) else self.newest

    def document(self) -> dict[str, Any]:
        """Return the history as a JSON object."""
        return {
            name: report and {"shape": asdict(report.shape), **asdict(report.kv)}
            for name, report in (("newest", self.newest), ("before", self.before))
        }

    @classmethod
    def of_document(cls, body: Mapping[str, Any]) -> "KvHistory | None":
        """Read a document back; None if it is no history."""
        try:
            before = body.get("before")
            return cls(_read(body.get("newest")), None if before is None else _read(before))
        except InvalidInput:
            return None


def _read(body: Any) -> KvReport:
    if not isinstance(body, Mapping):
        raise InvalidInput(f"{body!r:.40} is no report of a KV cache")
    shape = ModelShape.of_document(body.get("shape"))
    sizes = body.get("bytes_per_token"), body.get("free_bytes")
    if shape is None or not all(type(size) is int for size in sizes):
        raise InvalidInput("the shape or the bytes of a KV cache cannot be read")
    return KvReport(shape, KvMemory(*sizes))  # type: ignore[arg-type]


def _model(shape: ModelShape) -> tuple[int, int, int]:
    return shape.num_layers, shape.num_logical_experts, shape.bytes_per_expert


def _slots(shape: ModelShape) -> tuple[int, int, int | None]:
    return shape.num_ranks, shape.slots_per_rank, shape.pool_slots_per_rank


def _words(
    base: KvReport, shape: ModelShape, told: KvMemory | None, promised: int, ratio: float | None
) -> str:
    slots, before = (f"{one.num_ranks} x {one.slots_per_rank}" for one in (shape, base.shape))
    words = (
        f"{slots} slots a layer instead of {before} promised {promised:,} KV tokens a rank; the"
        " engine"
    )
    if told is None:
        return f"{words} has not reported its KV cache yet."
    share = "" if ratio is None else f", {ratio:.1%} of that"
    words = f"{words} reports {told.tokens():,}{share}."
    if told.bytes_per_token != base.kv.bytes_per_token:
        words += (
            f" A KV token has {told.bytes_per_token:,} bytes now and had"
            f" {base.kv.bytes_per_token:,}."
        )
    return words
