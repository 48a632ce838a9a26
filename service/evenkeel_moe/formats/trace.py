"""Defines a trace: the recorded loads of one deployment, independent of the recording tool."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from evenkeel_moe.errors import InvalidInput, ShapeMismatch
from evenkeel_moe.formats.reading import check_layer_ids, naming
from evenkeel_moe.model.finding import Finding, FindingCode, Severity, plural, spans
from evenkeel_moe.planning.signals.load_findings import check_hidden_layers

_Content = TypeVar("_Content")
MOST_RANKS = 1 << 16
"""Ranks of a recording, beyond which a number of ranks is damaged."""


@dataclass(frozen=True, eq=False)
class Trace:
    """The routed tokens per step, MoE layer and logical expert, with facts about the recording."""

    counts: NDArray[np.int64]
    """(T, L, E) [tokens], steps in order."""
    layer_ids: tuple[int, ...]
    """(L,) index of each row among the model's hidden layers, dense layers included; rising."""
    name: str = "trace"
    top_k: int | None = None
    """Experts per token; None if the recording does not have it."""
    tokens: NDArray[np.int64] | None = None
    """(T,) tokens of each step."""
    source: NDArray[np.int64] | None = None
    """(T, R', L, E) [tokens] - the same counts by source rank."""
    mix: NDArray[np.float64] | None = None
    """(T, D) share of each domain of text in each step."""
    domains: tuple[str, ...] = ()
    """Names of the D domains."""
    findings: tuple[Finding, ...] = ()
    """What the reader assumed, left out or found to be missing, and what the counts show."""
    num_hidden_layers: int | None = None
    """Rows of the model, dense layers included; None if the recording does not have it."""
    rank_files: int | None = None
    """Ranks whose files were added up, where no file says how many there were; else None."""

    def __post_init__(self) -> None:
        counts = self.counts
        if counts.ndim != 3 or 0 in counts.shape:
            raise ShapeMismatch(
                f"counts must be (steps, layers, experts), none of them 0, got {counts.shape}"
            )
        if counts.min() < 0:
            step, layer, expert = np.argwhere(counts < 0)[0]
            raise InvalidInput(
                f"{int((counts < 0).sum())} negative counts, first: {counts[step, layer, expert]}"
                f" in step {step} layer {layer} expert {expert}"
            )
        check_layer_ids(self.layer_ids, self.num_layers)
        hidden = self.num_hidden_layers
        if hidden is not None and hidden <= self.layer_ids[-1]:
            raise InvalidInput(f"{hidden} hidden layers, but counts of layer {self.layer_ids[-1]}")
        if self.top_k is not None and not 1 <= self.top_k <= self.num_experts:
            raise InvalidInput(
                f"top-k is {self.top_k}, must be 1..{self.num_experts}, the experts of a layer"
            )
        self._check_tokens()
        self._check_source()
        if self.mix is not None and self.mix.shape != (self.num_steps, len(self.domains)):
            raise ShapeMismatch(
                f"mix must be ({self.num_steps}, {len(self.domains)}), steps by domains,"
                f" got {self.mix.shape}"
            )

    def _check_tokens(self) -> None:
        if self.tokens is None:
            return
        if self.tokens.shape != (self.num_steps,):
            raise ShapeMismatch(f"tokens must be ({self.num_steps},), got {self.tokens.shape}")
        if self.top_k is None:
            return
        sums = self.counts.sum(axis=2)
        wrong = np.argwhere(sums != self.tokens[:, None] * self.top_k)
        if len(wrong):
            step, layer = wrong[0]
            raise InvalidInput(
                f"{len(wrong)} (step, layer) sums are not tokens x top-k, first: step {step}"
                f" layer {layer} counts {sums[step, layer]}, {self.tokens[step]} tokens x"
                f" {self.top_k} = {self.tokens[step] * self.top_k}"
            )

    def _check_source(self) -> None:
        if self.source is None:
            return
        want = (self.num_steps, self.num_layers, self.num_experts)
        have = self.source.shape
        if self.source.ndim != 4 or (have[0], *have[2:]) != want or have[1] < 1:
            raise ShapeMismatch(
                f"source counts must be ({want[0]}, ranks, {want[1]}, {want[2]}), got {have}"
            )
        if self.source.min() < 0:
            raise InvalidInput(f"{int((self.source < 0).sum())} negative source counts")
        wrong = np.argwhere(self.source.sum(axis=1) != self.counts)
        if len(wrong):
            step, layer, expert = wrong[0]
            raise InvalidInput(
                f"{len(wrong)} source counts do not sum to the counts, first: step {step}"
                f" layer {layer} expert {expert}: {self.source[step, :, layer, expert].sum()}"
                f" against {self.counts[step, layer, expert]}"
            )

    @property
    def num_steps(self) -> int:
        """T, the number of steps."""
        return int(self.counts.shape[0])

    @property
    def num_layers(self) -> int:
        """L, the number of MoE layers."""
        return int(self.counts.shape[1])

    @property
    def num_experts(self) -> int:
        """E, the number of logical experts."""
        return int(self.counts.shape[2])

    def cut(self, first: int, last: int) -> "Trace":
        """Return the steps first..last-1.

        Raises:
            InvalidInput: there are no such steps.
        """
        if not 0 <= first < last <= self.num_steps:
            raise InvalidInput(f"cannot cut steps {first}..{last} from a trace of {self.num_steps}")
        part = slice(first, last)
        return replace(
            self,
            counts=self.counts[part],
            tokens=None if self.tokens is None else self.tokens[part],
            source=None if self.source is None else self.source[part],
            mix=None if self.mix is None else self.mix[part],
        )


def left_out(what: str, where: str = "", amount: str = "", advice: str = "") -> Finding:
    """Return the note of a reader that left something out."""
    return Finding(FindingCode.LEFT_OUT, Severity.NOTE, what, where, amount, advice)


def assumed(what: str, where: str = "", amount: str = "", advice: str = "") -> Finding:
    """Return the note of a reader that had to assume something."""
    return Finding(FindingCode.ASSUMED, Severity.NOTE, what, where, amount, advice)


def whole_steps(
    by_rank: Mapping[int, Collection[int]], noun: str
) -> tuple[list[int], tuple[Finding, ...]]:
    """Return the steps that every rank has, and a note that names those that some ranks lack.

    Args:
        by_rank: the steps of each rank.
        noun: what the recording calls a step.

    Returns:
        the steps in rising order, findings.

    Raises:
        InvalidInput: less than half of the steps are whole.
    """
    all_steps = set().union(*by_rank.values())
    lacking = {step for have in by_rank.values() for step in all_steps.difference(have)}
    whole = sorted(all_steps - lacking)
    if not lacking:
        return whole, ()
    fewest = min(by_rank, key=lambda rank: len(by_rank[rank]))
    most = max(by_rank, key=lambda rank: len(by_rank[rank]))
    amount = (
        f"{len(lacking)} of {len(all_steps)} {plural(noun)}; rank {fewest} has"
        f" {len(by_rank[fewest])}, rank {most} {len(by_rank[most])}"
    )
    if 2 * len(whole) < len(all_steps) or not whole:
        raise InvalidInput(
            f"most {plural(noun)} are not on all {len(by_rank)} ranks: {spans(noun, lacking)},"
            f" {amount}. Take the files of one recording of all ranks"
        )
    what = f"{plural(noun)} that some ranks did not record are left out"
    return whole, (left_out(what, spans(noun, lacking), amount),)


def readable(
    paths: Iterable[Path], read: Callable[[Path], _Content], broken: dict[str, str]
) -> Iterator[tuple[Path, _Content]]:
    """Yield what each file of a recording holds, one at a time: all at once may not fit in memory.

    Mutates: `broken`, which gets the error of each file that is damaged.
    """
    for path in paths:
        try:
            with naming(path.name):
                held = read(path)
        except InvalidInput as error:
            broken[path.name] = str(error)
        else:
            yield path, held


def damaged(broken: Mapping[str, str], files: int) -> tuple[Finding, ...]:
    """Return a doubt that names the damaged files of a recording.

    Raises:
        InvalidInput: half of the files or more are damaged.
    """
    if not broken:
        return ()
    first = next(iter(broken.values()))
    if 2 * len(broken) >= files:
        raise InvalidInput(f"{len(broken)} of {files} files are damaged; {first}")
    return (
        Finding(
            FindingCode.PARTS_MISSING,
            Severity.DOUBT,
            "files that cannot be read are left out",
            ", ".join(list(broken)[:4]),
            f"{len(broken)} of {files} files; {first:.300}",
            "Copy them again",
        ),
    )


def missing_ranks(found: Collection[int], size: int) -> list[int]:
    """Return the ranks of a group of which nothing was found.

    Raises:
        InvalidInput: the group is larger than any. Files name ranks, and are not trusted.
    """
    if size > MOST_RANKS:
        raise InvalidInput(f"is of {size} ranks, at most {MOST_RANKS} are read")
    return sorted(set(range(size)).difference(found))


def ranks_read(ranks: Collection[int], size: int | None = None) -> tuple[Finding, ...]:
    """Say which ranks' files were read; a recording of files by rank may lack some.

    `size` is the number of ranks of the group; None if no file says it.
    """
    known = max(ranks) + 1 if size is None else size
    missing = missing_ranks(ranks, known)
    if missing:
        half = size is not None and 2 * len(missing) >= size
        return (
            Finding(
                FindingCode.PARTS_MISSING,
                Severity.REFUSAL if half else Severity.DOUBT,
                "some ranks have no file that can be read, so their tokens are missing",
                spans("rank", missing),
                f"{len(missing)} of {known} ranks",
                "Copy the files of all machines into the folder",
            ),
        )
    if size is not None:
        return ()
    return (
        assumed(
            "these are taken to be all ranks, because no file says how many there were",
            spans("rank", ranks),
        ),
    )


def drop_idle_steps(counts: NDArray[np.int64]) -> tuple[NDArray[np.int64], tuple[Finding, ...]]:
    """Return (T, L, E) counts without steps that routed nothing, and a note if there were any.

    Raises:
        InvalidInput: no step routed anything.
    """
    busy = counts.any(axis=(1, 2))
    if not busy.any():
        raise InvalidInput(f"none of the {len(counts)} steps routed a token")
    if busy.all():
        return counts, ()
    amount = f"{int((~busy).sum())} of {len(counts)} steps"
    return counts[busy], (left_out("steps that routed nothing are left out", amount=amount),)


def moe_rows(
    counts: NDArray[np.int64], first_moe_layer: int | None
) -> tuple[NDArray[np.int64], tuple[int, ...], tuple[Finding, ...]]:
    """Return the rows of MoE layers of a recording that has a row for each hidden layer.

    Args:
        counts: (T, H, E) [tokens]; at least one row must have routed a token.
        first_moe_layer: number of hidden layers before the first MoE layer; None takes every row
            that ever routed a token, because dense layers have rows that never count.

    Returns:
        The rows, their hidden layers, and what the rows that never counted show.

    Raises:
        InvalidInput: there is no such layer.
    """
    hidden = counts.shape[1]
    if first_moe_layer is None:
        busy = np.asarray(counts.any(axis=(0, 2)), np.bool_)
        rows = np.flatnonzero(busy)
        return counts[:, rows], tuple(rows.tolist()), check_hidden_layers(busy)
    if not 0 <= first_moe_layer < hidden:
        raise InvalidInput(
            f"first MoE layer {first_moe_layer} is outside the {hidden} hidden layers"
        )
    return counts[:, first_moe_layer:], tuple(range(first_moe_layer, hidden)), ()
