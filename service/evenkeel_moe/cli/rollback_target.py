"""Asks the operator whether ranks are to return to a placement, and says which one it is."""

from evenkeel_moe.cli import plan_questions
from evenkeel_moe.cli.client import ApiClient
from evenkeel_moe.cli.confirm import confirm

_LOOKED_AT = 100
"""Newest plans among which a rollback looks for the one that it takes back."""


def confirm_placement(client: ApiClient, name: str, digest: str) -> None:
    """Let the operator agree to the return to a recorded placement.

    Raises:
        CliError: no such placement is recorded, or the operator did not agree.
    """
    preview = client.get(f"deployments/{name}/rollback", to_placement=digest)
    confirm(plan_questions.rollback_to_placement(preview, name, digest), False)


def confirmed_epoch(client: ApiClient, name: str, to_epoch: int | None) -> int:
    """Return the epoch of the placement to return to, after the operator agreed to it.

    The request then names this epoch, also if another plan ends meanwhile.

    Raises:
        CliError: no earlier placement is recorded, or the operator did not agree.
    """
    preview = client.get(f"deployments/{name}/rollback", to_epoch=to_epoch)
    plans = client.every(f"deployments/{name}/plans", _LOOKED_AT)
    confirm(plan_questions.rollback(preview, name, plans), False)
    return int(preview["to_epoch"])
