"""REST: a thin skin over `ports.Operations`."""

from evenkeel.api.app import create_app
from evenkeel.api.auth import Role, Token, TokenSet

__all__ = ["Role", "Token", "TokenSet", "create_app"]
