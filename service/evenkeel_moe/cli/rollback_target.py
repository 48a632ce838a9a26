"""Asks the operator whether ranks are to return to a placement, and says which one it is."""

from evenkeel_moe.cli import plan_questions
from evenkeel_moe.cli.client import ApiClient, CliError, Exit
from evenkeel_moe.cli.confirm import confirm

_LOOKED_AT = 100
"""Newest plans among which a rollback looks for the one that it takes back."""


def confirm_placement(client: ApiClient, name: str, digest: str) -> None:
    """Let the operator agree to the return to a recorded placement.

    Raises:
        CliError: no such placement is recorded, or the operator did not agree.
    """
    path = f"deployments/{name}"
    status = client.get(path)
    known = [row for row in client.get(f"{path}/epochs")["items"] if row["digest"] == digest]
    if not known:
        raise CliError(f"no placement {digest} of {name} is recorded", Exit.REFUSED)
    confirm(plan_questions.rollback_to_placement(status, known[0]), False)


def confirmed_epoch(client: ApiClient, name: str, to_epoch: int | None) -> int:
    """Return the epoch of the placement to return to, after the operator agreed to it.

    The request then names this epoch, also if another plan ends meanwhile.

    Raises:
        CliError: no earlier placement is recorded, or the operator did not agree.
    """
    path = f"deployments/{name}"
    status = client.get(path)
    epoch = status["rollback_epoch"] if to_epoch is None else to_epoch
    if epoch is None:
        raise CliError(f"no earlier placement of {name} is recorded", Exit.REFUSED)
    plans = client.every(f"{path}/plans", _LOOKED_AT)
    confirm(plan_questions.rollback(status, plans, epoch), False)
    return int(epoch)
