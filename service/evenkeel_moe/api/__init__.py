"""The REST API over `ports.Operations`."""

from evenkeel_moe.api.app import create_app
from evenkeel_moe.api.auth import Role, Token, TokenSet

__all__ = ["Role", "Token", "TokenSet", "create_app"]
