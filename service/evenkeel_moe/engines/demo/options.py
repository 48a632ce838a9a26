"""The options of the demo."""

from dataclasses import dataclass
from pathlib import Path

from evenkeel_moe.engines.reference.config import DispatchRule, Fault
from evenkeel_moe.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """The options of one run."""

    ranks: int = 4
    nodes: int = 1
    """The ranks are spread over the nodes in blocks."""
    steps: int = 600
    """Half of them serve prose, half code."""
    step_s: float = 0.08
    """Minimum duration of a step, so that a user can follow the run."""
    policy: str = "keel"
    dispatch: DispatchRule = DispatchRule.EVEN
    """The rule by which ranks choose replicas; the planner plans for it."""
    mode: str = "auto"
    """auto, propose (the demo approves each proposal, like an operator) or observe."""
    redis_url: str = ""
    """Empty lets the controller start its own server."""
    fault: Fault | None = None
    folder: Path | None = None
    """Folder for logs and lines; None removes them at the end."""
    timeout_s: float = 170.0
    """After this time the run is stopped, and has failed."""

    def __post_init__(self) -> None:
        if self.mode not in ("auto", "propose", "observe"):
            raise InvalidInput(f"mode {self.mode} is not auto, propose or observe")
        if self.ranks < 2:
            raise InvalidInput(f"{self.ranks} ranks leave nothing to balance, use at least 2")
        if not 1 <= self.nodes <= self.ranks:
            raise InvalidInput(f"{self.ranks} ranks cannot be spread over {self.nodes} nodes")
        if self.steps < 200:
            raise InvalidInput(f"{self.steps} steps are too few for two plans, use at least 200")

    @property
    def shift_at(self) -> int:
        """The step at which the text changes from prose to code."""
        return self.steps // 2

    @property
    def node_of_rank(self) -> tuple[int, ...]:
        """The node of each rank: (R,)."""
        return tuple(rank * self.nodes // self.ranks for rank in range(self.ranks))
