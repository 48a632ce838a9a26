"""Sizes and settings of the system under test."""

from collections.abc import Sequence
from pathlib import Path

from evenkeel_moe.engines.reference.config import RankConfig
from tests.chaos.processes import DEPLOYMENT

__all__ = ["FORGET_AFTER_S", "LEASE_S", "POOL_PER_LAYER", "SETTINGS", "rank_config"]

LEASE_S = 3.0
FORGET_AFTER_S = 12.0
POOL_PER_LAYER = 4
SETTINGS = {
    "LEADER__LEASE_S": f"{LEASE_S}",
    "LEADER__RENEW_S": "0.75",
    "REDIS__TIMEOUT_S": "0.6",
    "INGEST__HEARTBEAT_S": "0.5",
    "INGEST__RANK_LEASE_S": "3",
    "INGEST__FORGET_AFTER_S": f"{FORGET_AFTER_S}",
    "PLANNER__MODE": "observe",
    "PLANNER__POLICY": "eplb",
    "PLANNER__RECENT_STEPS": "16",
    "PLANNER__THRESHOLDS": '{"min_window_steps": 16}',
    "WINDOW__STEPS": "128",
    "WINDOW__PLAN_STEPS": "96",
    # Copies take about half a second a wave, so that faults strike while they run.
    "MIGRATION__MAX_BYTES_PER_S": "40000",
    "MIGRATION__PREPARE_DEADLINE_S": "30",
    "MIGRATION__STALL_AFTER_S": "15",
    "METRICS__REFRESH_S": "1",
}
"""The settings of the controllers, without the prefix of their variables."""


def rank_config(folder: Path, num_ranks: int, controllers: Sequence[str]) -> RankConfig:
    """Return the configuration of the ranks.

    Args:
        folder: for what they write.
        num_ranks: of the reference engine.
        controllers: `host:port` of each replica.
    """
    return RankConfig(
        run_folder=str(folder),
        num_ranks=num_ranks,
        deployment=DEPLOYMENT,
        controllers=tuple(controllers),
        layers=4,
        experts=2 * num_ranks,
        slots_per_rank=5,
        pool_slots_per_layer=POOL_PER_LAYER,
        d_model=16,
        d_ffn=32,
        tokens_per_step=32,
        steps=0,
        min_step_s=0.1,
        # One layer, or two, in a wave.
        staging_bytes=48 << 10,
        group_timeout_s=60.0,
        shrinks=True,
    )
