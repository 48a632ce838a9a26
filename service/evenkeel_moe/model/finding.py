"""A finding: something about recorded or reported loads that contradicts how an engine routes."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum

from evenkeel_moe.errors import InvalidInput


class Severity(StrEnum):
    """What a finding does to whatever is decided on the loads."""

    NOTE = "note"
    """An assumption or an omission that is said; verdicts stand."""
    DOUBT = "doubt"
    """The loads may not be those of the engine: no verdict is certain."""
    REFUSAL = "refusal"
    """The loads cannot be those of the engine: nothing is decided on them."""


class FindingCode(StrEnum):
    """The closed list of findings; also the metric label, and what `--accept` takes."""

    # What the counts themselves show.
    UNEVEN_LAYERS = "uneven_layers"
    IDLE_LAYERS = "idle_layers"
    LEADING_IDLE_LAYERS = "leading_idle_layers"
    MOSTLY_IDLE_LAYERS = "mostly_idle_layers"
    EQUAL_LAYERS = "equal_layers"
    IDLE_EXPERTS = "idle_experts"
    RISING_TOTALS = "rising_totals"
    REPEATED_STEPS = "repeated_steps"
    IMPOSSIBLE_CHOICES = "impossible_choices"

    # What a reader found in a file.
    LEFT_OUT = "left_out"
    PARTS_MISSING = "parts_missing"
    PADDING = "padding"
    ROUTES_MISSING = "routes_missing"
    REPEATED_PROMPTS = "repeated_prompts"
    STEP_ORDER = "step_order"
    ASSUMED = "assumed"


LIVE_CODES = (FindingCode.UNEVEN_LAYERS, FindingCode.IDLE_LAYERS, FindingCode.IDLE_EXPERTS)
"""The findings that a live window can have."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding, in words that are shown to people."""

    code: FindingCode
    severity: Severity
    what: str
    """The contradiction or the assumption, without a full stop."""
    where: str = ""
    """The layers, steps, ranks, experts or files; empty if it is about everything."""
    amount: str = ""
    """How much, with numbers; empty if `what` says it."""
    advice: str = ""
    """What to do, as a sentence without a full stop; empty if there is nothing to do."""
    share: float | None = field(default=None, kw_only=True)
    """How much, as a share of the choices, layers or experts that there are; None if `amount` alone
    tells it."""

    @property
    def words(self) -> str:
        """The finding as one line."""
        line = ", ".join(part for part in (self.where, self.amount) if part)
        line = f"{self.what}: {line}" if line else self.what
        return f"{line}. {self.advice}." if self.advice else line


def judge_findings(
    findings: Collection[Finding], accept: Collection[str] = ()
) -> tuple[Finding, ...]:
    """Return the findings, the gravest first, those that are accepted as notes.

    Args:
        findings: of one recording.
        accept: codes of findings that a person has looked at.

    Raises:
        InvalidInput: a finding refuses the loads, or a code is unknown.
    """
    unknown = sorted(set(accept) - set(FindingCode))
    if unknown:
        raise InvalidInput(
            f"there is no finding {', '.join(unknown)}; known: {', '.join(FindingCode)}"
        )
    judged = [
        replace(finding, severity=Severity.NOTE) if finding.code in accept else finding
        for finding in findings
    ]
    refusals = [finding for finding in judged if finding.severity is Severity.REFUSAL]
    if refusals:
        lines = "; ".join(finding.words.removesuffix(".") for finding in refusals)
        codes = " ".join(f"--accept {code}" for code in sorted({each.code for each in refusals}))
        raise InvalidInput(f"{lines}. If the counts are right all the same: {codes}")
    return tuple(sorted(judged, key=lambda finding: finding.severity is Severity.NOTE))


def doubts(findings: Collection[Finding]) -> tuple[Finding, ...]:
    """Return the findings under which no verdict is certain."""
    return tuple(finding for finding in findings if finding.severity is Severity.DOUBT)


def spans(noun: str, numbers: Collection[int], most: int = 6) -> str:
    """Return whole numbers as ranges, "layers 0..2, 7"; only the first `most` ranges."""
    parts = runs(sorted(numbers), "..")
    more = f" and {len(parts) - most} more" if len(parts) > most else ""
    return f"{plural(noun) if len(numbers) > 1 else noun} {', '.join(parts[:most])}{more}"


def runs(numbers: Iterable[int], dash: str) -> list[str]:
    """Return rising numbers as texts, runs of them as the first and the last around `dash`."""
    parts: list[tuple[int, int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1] = (parts[-1][0], number)
        else:
            parts.append((number, number))
    return [str(first) if first == last else f"{first}{dash}{last}" for first, last in parts]


def plural(noun: str) -> str:
    """Return the plural of a regular noun."""
    return f"{noun}es" if noun.endswith("s") else f"{noun}s"
