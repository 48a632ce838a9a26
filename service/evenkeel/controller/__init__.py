"""The controller process."""

from evenkeel.controller.serve import run, serve

__all__ = ["run", "serve"]
