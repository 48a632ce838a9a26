"""Renders recommendations, audits and rejected reports. Pure functions from JSON to renderables."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from evenkeel_moe.cli.console import Listing, TableColumn, explained, legend
from evenkeel_moe.cli.tables import interval, number
from evenkeel_moe.cli.units import moment, moments
from evenkeel_moe.model.quantities import bytes_text, duration_text, share

_LEVELS_BASE = (
    "Every row is a new placement of that many extra replicas by a simple rule. So the row (now) is"
    " not the present placement. Gains are relative to it."
)


_OTHER_RULES = "The number advised above is by predicted MoE time alone."


def recommendation_view(answer: Mapping[str, Any]) -> RenderableType:
    """Return a recommendation: its answer in a sentence, its arithmetic, and its comparisons."""
    call = f"{answer['call_text']}. {answer['reason_text']}"
    parts: list[RenderableType] = [
        Text(f"{answer['deployment']}: {call}", style="bold"),
        Text(f"at {moment(answer['at'])} UTC, epoch {answer['epoch']}, policy {answer['policy']}"),
        Text(),
        *(Text(words) for words in answer["words"]),
    ]
    if answer["policies"]:
        parts += [Text("\nPolicies", style="bold"), _policies(answer["policies"])]
    if answer["redundancy"] is not None:
        advised, present = answer["redundancy"]["advised"], answer["redundancy"]["present"]
        title = f"\nExtra replicas per layer: {present} now, {advised} advised"
        parts += [Text(title, style="bold"), Text(_LEVELS_BASE), _levels(answer["redundancy"])]
    tradeoff = answer["replica_tradeoff"]
    if tradeoff is not None:
        words = (_OTHER_RULES, tradeoff["words"], tradeoff["craft_words"])
        parts += [
            Text("\nOther rules for the number of extra replicas", style="bold"),
            *(Text(text) for text in words if text),
        ]
    return Group(
        *parts,
        legend("gain: saved share of MoE time on later steps, with its 94 % interval"),
    )


def placements_table(rows: Sequence[Mapping[str, Any]]) -> RenderableType:
    """Return a table with one row for each recorded placement."""
    if not rows:
        return Text("no placement is recorded yet", style="dim")
    columns = (TableColumn("EPOCH", right=True), TableColumn("PLACEMENT"), TableColumn("STATE"))
    states = ["replaced" if row["replaced"] else "earlier" for row in rows]
    if not rows[0]["replaced"]:
        states[0] = "present"
    cells = [
        (str(row["epoch"]), row["digest"], state) for row, state in zip(rows, states, strict=True)
    ]
    words = ["return to one: evenkeel plan rollback --to-placement PLACEMENT"]
    if "replaced" in states:
        words.append(
            "replaced: of another history, before a cold start or of other ranks with this name"
        )
    return Group(Listing(columns, cells), legend(*words))


def _policies(rows: Sequence[Mapping[str, Any]]) -> Listing:
    columns = (
        TableColumn("POLICY"),
        TableColumn("OUTCOME", fold=True),
        TableColumn("GAIN", right=True),
        TableColumn("INTERVAL"),
        TableColumn("COPIES", right=True),
        TableColumn("BYTES", right=True, wide=True),
        TableColumn("BALANCEDNESS", right=True, wide=True),
        TableColumn("PAYS AFTER", right=True, wide=True),
    )
    return Listing(columns, [_policy(row) for row in rows])


def _policy(row: Mapping[str, Any]) -> tuple[str, ...]:
    verdict = row["verdict"] or {}
    steps = verdict.get("payback_steps")
    after = "-" if steps is None else "under 1 step" if steps < 1 else f"{steps:,.0f} steps"
    if verdict.get("payback_s") is not None:
        after = duration_text(verdict["payback_s"])
    return (
        row["policy"],
        row["reason_text"],
        share(verdict.get("gain")),
        interval(verdict),
        "-" if row["copies"] is None else f"{row['copies']:,}",
        bytes_text(row["nbytes"]),
        number(row["balancedness_expected"]),
        after,
    )


def _levels(redundancy: Mapping[str, Any]) -> Listing:
    columns = (
        TableColumn("EXTRA REPLICAS", right=True),
        TableColumn("GAIN", right=True),
        TableColumn("INTERVAL"),
        TableColumn("MORE MEMORY PER RANK", right=True),
        TableColumn("FITS"),
        TableColumn("BALANCEDNESS", right=True, wide=True),
    )
    fits = {None: "-", True: "yes", False: "no"}
    cells = [
        (
            f"{row['replicas_per_layer']}"
            + (" (now)" if row["replicas_per_layer"] == redundancy["present"] else ""),
            share(row["gain"]),
            interval(row),
            bytes_text(row["extra_bytes_per_rank"]),
            fits[row["fits"]],
            number(row["balancedness"]),
        )
        for row in redundancy["levels"]
    ]
    return Listing(columns, cells)


def audit_table(rows: Sequence[Mapping[str, Any]]) -> RenderableType:
    """Return a table with one row for each request for a change."""
    if not rows:
        return Text("no request for a change is recorded", style="dim")
    columns = (
        TableColumn("AT (UTC)"),
        TableColumn("BY"),
        TableColumn("ROLE", wide=True),
        TableColumn("REQUEST", fold=True),
        TableColumn("OUTCOME"),
        TableColumn("TRACE", wide=True),
    )
    times, day = moments([row["at"] for row in rows])
    cells = [
        (
            at,
            row["by"],
            row["role"],
            row["text"],
            _outcome(row["status"]),
            row["trace_id"] or "-",
        )
        for at, row in zip(times, rows, strict=True)
    ]
    return Group(Listing(columns, cells), legend(*day)) if day else Listing(columns, cells)


def _outcome(status: int) -> Text:
    if status < 400:
        return Text(f"{status} done", style="green")
    words = {
        401: "unknown token",
        403: "not allowed",
        409: "did not fit",
        412: "was out of date",
        503: "unavailable",
    }
    return Text(f"{status} {words.get(status, 'refused')}", style="red")


def quarantine_view(answer: Mapping[str, Any]) -> RenderableType:
    """Return the rejected parts of reports by reason, each with its newest samples."""
    if not answer["items"]:
        return Text(f"{answer['deployment']}: no report was rejected")
    cells = [
        (
            row["reason"],
            f"{row['rank_steps']:,}",
            "\n".join(f"rank {one['rank']}: {one['detail']}" for one in row["samples"]),
        )
        for row in answer["items"]
    ]
    columns = (
        TableColumn("REASON"),
        TableColumn("RANK STEPS", right=True),
        TableColumn("NEWEST", fold=True),
    )
    return Group(
        Listing(columns, cells),
        legend(
            "rank steps: (rank, step) pairs whose counts are not in the window",
            *explained(answer["items"]),
        ),
    )
