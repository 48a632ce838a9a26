"""Asks the operator whether ranks are to return to a placement, and says which one it is."""

import re

from evenkeel_moe.cli import plan_questions
from evenkeel_moe.cli.client import ApiClient, CliError, Exit
from evenkeel_moe.cli.confirm import confirm

_DIGEST_DIGITS = 32
_LEAST_DIGITS = 6
"""Digits of a digest that must be given; fewer could name another placement by mistake."""


def whole_digest(client: ApiClient, name: str, text: str) -> str:
    """Return the digest of the recorded placement that begins with a text.

    A whole digest is returned unchanged, recorded or not.

    Raises:
        CliError: the text is no beginning of a digest, or of none or several recorded placements.
    """
    given, digits = text.lower(), _DIGEST_DIGITS
    if re.fullmatch(rf"[0-9a-f]{{{_LEAST_DIGITS},{digits}}}", given) is None:
        raise CliError(
            f"{text} is not a placement: give its {digits} digits of 0-9 and a-f, or its first"
            f" {_LEAST_DIGITS} or more; `evenkeel epochs {name}` lists them",
            Exit.USAGE,
        )
    if len(given) == digits:
        return given
    rows = client.get(f"deployments/{name}/epochs")["items"]
    found = list(dict.fromkeys(row["digest"] for row in rows if row["digest"].startswith(given)))
    if not found:
        raise CliError(
            f"no recorded placement begins with {given}; `evenkeel epochs {name}` lists them",
            Exit.REFUSED,
        )
    if len(found) > 1:
        raise CliError(
            f"{len(found)} recorded placements begin with {given}, give more digits:"
            f" {', '.join(found)}",
            Exit.USAGE,
        )
    return str(found[0])


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
    confirm(plan_questions.rollback(preview, name), False)
    return int(preview["to_epoch"])
