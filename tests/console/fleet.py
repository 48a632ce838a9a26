"""A real controller with the reference engine's ranks, for the console to look at."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from evenkeel_moe.engines.demo.controller import DemoController
from evenkeel_moe.engines.demo.options import DemoOptions
from evenkeel_moe.engines.demo.processes import StopFlag
from evenkeel_moe.engines.reference.config import RankConfig
from evenkeel_moe.engines.reference.supervisor import Supervisor
from tests.waiting import wait_until

READ, OPERATE, ADMIN = (f"{name}-token-0123456789" for name in ("read", "operate", "admin"))
TOKENS = f"reader read {READ}\noperator operate {OPERATE}\nowner admin {ADMIN}\n"
NAME = "chat-large"
KV_BYTES_PER_TOKEN, KV_FREE_BYTES = 4096, 64 << 20


@dataclass
class Fleet:
    """A running fleet."""

    controller: DemoController
    ranks: Supervisor

    @property
    def url(self) -> str:
        return f"{self.controller.rest_url}/"

    @property
    def token_file(self) -> Path:
        return self.controller.token_file

    def get(self, path: str = "") -> Any:
        return self.controller.get(f"deployments/{NAME}{path}")

    def known(self) -> bool:
        """True once ranks have registered; before, the deployment is missing or has no shape."""
        try:
            return self.get() is not None
        except httpx.HTTPStatusError as error:
            if error.response.status_code != httpx.codes.SERVICE_UNAVAILABLE:
                raise
            return False

    def plans(self, phase: str) -> list[dict[str, Any]]:
        return [plan for plan in self.get("/plans")["items"] if plan["phase"] == phase]

    def wait_proposal(self) -> dict[str, Any]:
        """A plan that waits for approval and fits the present placement."""

        def fitting() -> dict[str, Any] | None:
            epoch = self.get()["epoch"]
            waiting = [plan for plan in self.plans("proposed") if plan["base_epoch"] == epoch]
            return waiting[0] if waiting else None

        found: dict[str, Any] = wait_until(fitting, within_s=120, every_s=0.5, what="a proposal")
        return found


@contextmanager
def running_fleet(folder: Path, *, mode: str = "propose", step_s: float = 0.1) -> Iterator[Fleet]:
    """Four ranks whose text changes back and forth, until the block ends."""
    controller = DemoController(DemoOptions(mode=mode), folder)
    ranks: Supervisor | None = None
    try:
        stop = StopFlag()
        # One call waits for a minute at most; a busy machine takes longer to import a controller.
        wait_until(
            lambda: controller.wait_ready(stop) or not controller.running, within_s=120, what="REST"
        )
        assert controller.running, controller.log_tail()
        controller.wait_planner(stop)
        # The controller reads the file again when it changes.
        own = controller.token_file.read_text(encoding="utf-8")
        controller.token_file.write_text(own + TOKENS, encoding="utf-8")
        ranks = Supervisor(
            RankConfig(
                run_folder=str(folder / "ranks"),
                num_ranks=4,
                nodes=(0, 0, 1, 1),
                deployment=NAME,
                controllers=(controller.grpc_address,),
                steps=0,
                shift_at=600,
                shift_back=True,
                min_step_s=step_s,
                verify_every=0,
                kv_bytes_per_token=KV_BYTES_PER_TOKEN,
                kv_free_bytes=KV_FREE_BYTES,
            ),
            max_restarts=3,
        )
        ranks.start()
        fleet = Fleet(controller, ranks)
        wait_until(fleet.known, within_s=90, every_s=0.3, what="the ranks")
        yield fleet
    finally:
        if ranks is not None:
            ranks.stop()
        controller.stop()
