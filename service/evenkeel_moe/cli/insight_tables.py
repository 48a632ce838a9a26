"""Renders recommendations, audits and rejected reports. Pure functions from JSON to renderables."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from evenkeel_moe.cli.console import Listing, TableColumn, explained, legend
from evenkeel_moe.cli.tables import interval, number, yes_or_no
from evenkeel_moe.cli.units import dated, moment
from evenkeel_moe.model.quantities import bytes_text, duration_text, share

_LEVELS_BASE = (
    "Every row is a new placement of that many extra replicas by a simple rule. So the row (now) is"
    " not the present placement. Gains are relative to it."
)


_BARS = " ▁▂▃▄▅▆▇█"
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
        parts += _craft(answer["redundancy"]["craft_allocation"])
    return Group(
        *parts, legend("gain: saved share of MoE time on later steps, with its 94 % interval")
    )


def placements_table(rows: Sequence[Mapping[str, Any]]) -> RenderableType:
    """Return a table with one row for each recorded placement."""
    if not rows:
        return Text("no placement is recorded yet", style="dim")
    states = ["replaced" if row["replaced"] else "earlier" for row in rows]
    if not rows[0]["replaced"]:
        states[0] = "present"
    shown = [{**row, "state": state} for row, state in zip(rows, states, strict=True)]
    columns = (
        TableColumn("EPOCH", "epoch", right=True),
        TableColumn("PLACEMENT", "digest"),
        TableColumn("STATE", "state"),
    )
    words = ["return to one: evenkeel plan rollback --to-placement PLACEMENT"]
    if "replaced" in states:
        words.append(
            "replaced: of another history, before a cold start or of other ranks with this name"
        )
    return Group(Listing(columns, shown), legend(*words))


def _policies(rows: Sequence[Mapping[str, Any]]) -> Listing:
    columns = (
        TableColumn("POLICY", "policy"),
        TableColumn("OUTCOME", "reason_text", fold=True),
        TableColumn("GAIN", lambda row: _verdict(row).get("gain"), share, right=True),
        TableColumn("INTERVAL", _verdict, interval),
        TableColumn("COPIES", "copies", "{:,}".format, right=True),
        TableColumn("BYTES", "nbytes", bytes_text, right=True, wide=True),
        TableColumn("BALANCEDNESS", "balancedness_expected", number, right=True, wide=True),
        TableColumn("PAYS AFTER", _pays_after, right=True, wide=True),
    )
    return Listing(columns, rows)


def _verdict(row: Mapping[str, Any]) -> Mapping[str, Any]:
    return row["verdict"] or {}


def _pays_after(row: Mapping[str, Any]) -> str | None:
    verdict = _verdict(row)
    if verdict.get("payback_s") is not None:
        return duration_text(verdict["payback_s"])
    steps = verdict.get("payback_steps")
    return None if steps is None else "under 1 step" if steps < 1 else f"{steps:,.0f} steps"


def _levels(redundancy: Mapping[str, Any]) -> Listing:
    def replicas(row: Mapping[str, Any]) -> str:
        now = " (now)" if row["replicas_per_layer"] == redundancy["present"] else ""
        return f"{row['replicas_per_layer']}{now}"

    columns = (
        TableColumn("EXTRA REPLICAS", replicas, right=True),
        TableColumn("GAIN", "gain", share, right=True),
        TableColumn("INTERVAL", interval),
        TableColumn("MORE MEMORY PER RANK", "extra_bytes_per_rank", bytes_text, right=True),
        TableColumn("FITS", "fits", yes_or_no),
        TableColumn("BALANCEDNESS", "balancedness", number, right=True, wide=True),
    )
    return Listing(columns, redundancy["levels"])


def _craft(found: Mapping[str, Any] | None) -> list[RenderableType]:
    """Return what CRAFT would give each layer, with the layer's gain by its extra replicas."""
    if found is None or not found["counts"]:
        return []
    most = max(max(gains) for gains in found["gain"])
    full = most if most > 0 else 1.0

    def curve(gains: Sequence[float]) -> str:
        return "".join(f"{_BARS[round(max(gain, 0.0) / full * 8)]} " for gain in gains)

    def with_its_own(row: Mapping[str, Any]) -> float:
        gain = row["gain"][found["counts"].index(row["replicas"])] if row["replicas"] else 0.0
        return float(row["base"] + gain)

    rows = [
        {"layer": layer, "replicas": replicas, "base": base, "gain": gain}
        for layer, (replicas, base, gain) in enumerate(
            zip(found["replicas"], found["base"], found["gain"], strict=True)
        )
    ]
    columns = (
        TableColumn("LAYER", "layer", right=True),
        TableColumn("EXTRA REPLICAS", "replicas", right=True),
        TableColumn("BALANCEDNESS WITH NONE", "base", number, right=True),
        TableColumn("WITH THESE", with_its_own, number, right=True),
        TableColumn("GAIN BY NUMBER", "gain", curve),
    )
    title = f"\nCRAFT with R = {found['replication_factor']}, layer by layer"
    tried = ", ".join(map(str, found["counts"]))
    words = (
        f"gain by number: of balancedness, with {tried} extra replicas; the highest is {most:.3f}"
    )
    return [Text(title, style="bold"), Listing(columns, rows), legend(words)]


def audit_table(rows: Sequence[Mapping[str, Any]]) -> RenderableType:
    """Return a table with one row for each request for a change."""
    if not rows:
        return Text("no request for a change is recorded", style="dim")
    shown, day = dated(rows)
    columns = (
        TableColumn("AT (UTC)", "at"),
        TableColumn("BY", "by"),
        TableColumn("ROLE", "role", wide=True),
        TableColumn("REQUEST", "text", fold=True),
        TableColumn("OUTCOME", "status", _outcome),
        TableColumn("TRACE", lambda row: row["trace_id"] or None, wide=True),
    )
    return Group(Listing(columns, shown), legend(*day))


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
    columns = (
        TableColumn("REASON", "reason"),
        TableColumn("RANK STEPS", "rank_steps", "{:,}".format, right=True),
        TableColumn("NEWEST", "samples", _samples, fold=True),
    )
    return Group(
        Listing(columns, answer["items"]),
        legend(
            "rank steps: (rank, step) pairs whose counts are not in the window",
            *explained(answer["items"]),
        ),
    )


def _samples(samples: Sequence[Mapping[str, Any]]) -> str:
    return "\n".join(f"rank {one['rank']}: {one['detail']}" for one in samples)
