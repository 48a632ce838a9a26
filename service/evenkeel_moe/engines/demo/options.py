"""The options of the demo."""

from dataclasses import dataclass
from pathlib import Path

from evenkeel_moe.engines.reference.config import DispatchRule, Fault
from evenkeel_moe.errors import InvalidInput
from evenkeel_moe.model.policy import CostChoice

SLOW_RANK = 1
SLOW_FACTOR = 1.12
PACE_S_PER_TOKEN = 25e-6
"""With a slow rank, the experts of a layer take about 15 ms. Without a pace they would take as long
as other processes let them, and 12 % could not be seen."""
PACE_S_PER_REPLICA = 3e-4


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """The options of one run."""

    ranks: int = 4
    nodes: int = 1
    """The ranks are spread over the nodes in blocks."""
    steps: int = 600
    """Half of them serve prose, half code. With a slow rank all serve prose, and the rank is slow
    in the second third."""
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
    slow: bool = False
    """Slow the experts of one rank."""
    told: bool = False
    """The slow rank is slow from the start, and every rank tells its own compute time then. Without
    this, ranks tell none, and the controller has only the seconds of each step."""
    by_time: bool = False
    """Plan by the best known cost model. A run with a slow rank or for the console always does."""
    console: bool = False
    """Serve until stopped, for people who look at the console: the text changes back and forth, and
    nothing is checked or approved."""
    resize: bool = False
    """Serve requests with a KV cache, and take the group to six ranks and then to three."""
    folder: Path | None = None
    """Folder for logs and lines; None removes them at the end."""
    timeout_s: float = 600.0
    """After this time the run is stopped, and has failed. It takes under three minutes, on a slow
    machine several times as long."""

    def __post_init__(self) -> None:
        if self.mode not in ("auto", "propose", "observe"):
            raise InvalidInput(f"mode {self.mode} is not auto, propose or observe")
        if self.ranks < 2:
            raise InvalidInput(f"{self.ranks} ranks leave nothing to balance, use at least 2")
        if not 1 <= self.nodes <= self.ranks:
            raise InvalidInput(f"{self.ranks} ranks cannot be spread over {self.nodes} nodes")
        if self.steps < 200:
            raise InvalidInput(f"{self.steps} steps are too few for two plans, use at least 200")
        if self.console and (self.fault or self.slow):
            raise InvalidInput("console runs until it is stopped, without a fault or a slow rank")
        if self.resize and (self.console or self.fault or self.slow or self.mode != "auto"):
            raise InvalidInput("a resize runs in mode auto, without console, fault or slow rank")
        if self.told and not self.slow:
            raise InvalidInput("a compute time is told of a slow rank only")
        if self.slow and (self.mode == "observe" or self.fault or self.dispatch.fetches):
            raise InvalidInput(
                f"a slow rank needs plans, no fault and a paced dispatch, not mode {self.mode},"
                f" fault {self.fault or 'none'}, dispatch {self.dispatch}"
            )

    @property
    def cost(self) -> CostChoice:
        """The cost model to plan by.

        The checks of the other runs are of tokens. On a busy machine ranks differ in speed by
        chance, and a plan by time would give up balancedness for that.
        """
        by_time = self.by_time or self.slow or self.console
        return CostChoice.AUTO if by_time else CostChoice.TOKENS

    @property
    def shift_at(self) -> int:
        """The step at which the text changes from prose to code; 0 if it does not."""
        return 0 if self.slow else self.steps // 2

    @property
    def slow_from(self) -> int:
        """The first slow step."""
        return 0 if self.told else self.steps // 3

    @property
    def slow_until(self) -> int:
        """The first step after the slow ones; 0 if the rank stays slow."""
        return 0 if self.told else 2 * self.steps // 3

    @property
    def node_of_rank(self) -> tuple[int, ...]:
        """The node of each rank: (R,)."""
        return tuple(rank * self.nodes // self.ranks for rank in range(self.ranks))
