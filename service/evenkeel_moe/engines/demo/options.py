"""What a demonstration is asked to do."""

from dataclasses import dataclass
from pathlib import Path

from evenkeel_moe.engines.reference.config import DispatchRule, Fault
from evenkeel_moe.errors import InvalidInput

__all__ = ["DemoOptions"]


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """One run of the demo."""

    ranks: int = 4
    nodes: int = 1
    """Ranks are spread over them in blocks."""
    steps: int = 600
    """Half of them on prose, half on code."""
    step_s: float = 0.08
    """Least seconds of a step, so that there is something to look at."""
    policy: str = "keel"
    dispatch: DispatchRule = DispatchRule.EVEN
    """How ranks choose replicas; the planner is told and plans for it."""
    mode: str = "auto"
    """auto, propose (the demo approves each proposal, as an operator would) or observe."""
    redis_url: str = ""
    """Empty lets the controller start a server of its own."""
    fault: Fault | None = None
    folder: Path | None = None
    """Where logs and lines stay; None removes them at the end."""
    timeout_s: float = 170.0
    """The run is stopped, and has failed, after this long."""

    def __post_init__(self) -> None:
        if self.mode not in ("auto", "propose", "observe"):
            raise InvalidInput(f"mode {self.mode} is not auto, propose or observe")
        if self.ranks < 2:
            raise InvalidInput(f"{self.ranks} ranks leave nothing to balance, take at least 2")
        if not 1 <= self.nodes <= self.ranks:
            raise InvalidInput(f"{self.ranks} ranks cannot be spread over {self.nodes} nodes")
        if self.steps < 200:
            raise InvalidInput(
                f"{self.steps} steps end before the second plan can, take at least 200"
            )

    @property
    def shift_at(self) -> int:
        """Step at which the text changes from prose to code."""
        return self.steps // 2

    @property
    def node_of_rank(self) -> tuple[int, ...]:
        """(R,) node of each rank."""
        return tuple(rank * self.nodes // self.ranks for rank in range(self.ranks))
