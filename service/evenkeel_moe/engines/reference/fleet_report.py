"""The result of a run, and what it is made from: the lines that the ranks have written."""

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evenkeel_moe.engines.reference.config import ExitCode
from evenkeel_moe.engines.reference.lines import ends_of_lines, read_new_lines

FINAL = frozenset({ExitCode.FINISHED, ExitCode.CHECK_FAILED})
"""Exit codes after which the group is not restarted."""
_FINDINGS = ("epoch_mismatch", "check_failed")
"""Exit reasons that count as problems. A lost peer or a failed gate only causes a restart."""


@dataclass(frozen=True, slots=True)
class FleetReport:
    """The result of a run."""

    ok: bool
    """Every rank finished, and no rank reported a problem in any group."""
    codes: tuple[int, ...]
    """Exit code of each rank of the last group; minus the signal number if a signal ended it."""
    restarts: int
    steps: int
    """Newest step that any rank wrote, plus one."""
    problems: tuple[str, ...] = ()
    """Problems the ranks found, in words."""
    checks: tuple[dict[str, Any], ...] = ()
    """The `check` line of each rank of the last group that wrote one, after those of the ranks that
    retired before."""
    unconnected: str = ""
    """The reason that no rank was ever connected to a controller; empty if one was, or if none is
    configured."""
    retired: tuple[int, ...] = ()
    """Exit code of each process that retired, in any group."""

    @property
    def words(self) -> str:
        """The result in one sentence."""
        restarts = "1 restart" if self.restarts == 1 else f"{self.restarts} restarts"
        ended = f"the ranks ended after {self.steps} steps and {restarts}"
        alone = (
            f"; they were never connected to a controller: {self.unconnected}"
            if self.unconnected
            else ""
        )
        if self.ok:
            return f"{ended}: all {len(self.checks)} checks of weights and outputs passed{alone}"
        found = f"{len(self.problems)} problems" if self.problems else "not every check was made"
        return f"{ended}, with exit codes {', '.join(map(str, self.codes))}: {found}{alone}"


def died_words(codes: Sequence[int | None]) -> str:
    """Return which ranks died of what, such as `rank 1 died (signal 9)`.

    Args:
        codes: exit code of each rank, or minus the number of its signal; None while it runs.
    """
    return ", ".join(
        f"rank {rank} died ({f'signal {-code}' if code < 0 else f'exit code {code}'})"
        for rank, code in enumerate(codes)
        if code is not None and code not in FINAL
    )


class FleetRecord:
    """Reads the lines of a run's ranks as they come, and keeps them by group.

    Args:
        folder: of the run; lines that stand there already are of earlier runs.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read = ends_of_lines(folder)
        self._lines: defaultdict[tuple[int, str], dict[int, Mapping[str, Any]]] = defaultdict(dict)
        self._given_up: Counter[int] = Counter()
        self.newest_step: int | None = None
        """Newest step that any rank wrote; None before the first."""
        self.problems: list[str] = []
        """Problems that ranks found, in words."""
        self.connected = False
        """True if some rank was connected to a controller."""
        self.unconnected = "none had answered by the end"
        """The newest reason of a rank not to be."""

    def read(self) -> None:
        """Read what is new."""
        for line in read_new_lines(self._folder, self._read):
            self._take(line)

    def of_group(self, number: int, kind: str) -> Mapping[int, Mapping[str, Any]]:
        """Return the newest line of a kind of each rank of a group.

        What ranks write of the group that follows, `drained` and `refused`, is a line of that one,
        with the ranks of the group before.
        """
        return self._lines[number, kind]

    def given_up(self, number: int) -> int:
        """Return the number of requests that retiring ranks of a group left."""
        return self._given_up[number]

    def checks(self, last: int, ended: Collection[tuple[int, int]]) -> tuple[dict[str, Any], ...]:
        """Return the final checks of those who retired, as (group, rank), then of a last group."""
        found = [self.of_group(group, "check").get(rank) for group, rank in ended]
        found += [check for _, check in sorted(self.of_group(last, "check").items())]
        return tuple(dict(check) for check in found if check is not None)

    def _take(self, line: Mapping[str, Any]) -> None:
        kind = line["kind"]
        if kind == "step":
            self.newest_step = max(
                line["step"], -1 if self.newest_step is None else self.newest_step
            )
        elif kind == "link":
            self.connected |= line["connected"]
            self.unconnected = line["detail"] or self.unconnected
        elif kind == "check":
            self.problems += line["problems"]
        elif kind == "exit" and line["reason"] in _FINDINGS and line["detail"]:
            self.problems.append(f"rank {line['rank']} left: {line['reason']}: {line['detail']}")
        elif kind == "gave_up":
            self._given_up[line["group"]] += 1
        group = line.get("next_group", line.get("group"))
        self._lines[group, kind][line["rank"]] = line
