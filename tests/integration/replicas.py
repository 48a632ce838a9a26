"""Replicas of one controller as processes that share a store."""

from tests.integration.controller_rig import Controller

_TWO = ("one", "two")


def replicas(tmp_path, store, *names: str, **settings) -> tuple[Controller, ...]:
    """Return replicas, not yet started, that only observe."""
    environment = {
        "REDIS__URL": store.url,
        "LEADER__REPLICAS": str(len(names or _TWO)),
        "LEADER__LEASE_S": "3",
        "LEADER__RENEW_S": "0.75",
        "INGEST__HEARTBEAT_S": "0.5",
        # Ranks here do not come back by themselves; on a starved machine they must not seem lost.
        "INGEST__RANK_LEASE_S": "20",
        "PLANNER__MODE": "observe",
        **settings,
    }
    return tuple(
        Controller(tmp_path / name, **environment, LEADER__REPLICA_ID=name)
        for name in names or _TWO
    )
