"""A promise of the demo."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PromiseCheck:
    """A promise, and whether the run kept it."""

    promise: str
    held: bool
    detail: str
