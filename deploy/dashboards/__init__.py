"""The Grafana dashboards as code; `python -m deploy.generate` writes their JSON.

Every query is restricted to `$namespace` and `$deployment`; series without a namespace label match
too. Only the leader of a deployment exports its state, so queries take the maximum over replicas.
"""

from grafana_foundation_sdk.models import dashboard as models

from deploy.dashboards.deployment import deployment
from deploy.dashboards.fleet import fleet

__all__ = ["dashboards"]


def dashboards() -> dict[str, models.Dashboard]:
    """File name without suffix -> dashboard."""
    return {"evenkeel-fleet": fleet().build(), "evenkeel-deployment": deployment().build()}


# --- parts ---
