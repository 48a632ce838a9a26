"""Decides whether a change of traffic still waits for an answer, and whether the answer is urgent.

Few steps are known soon after a change. A first plan is made on them and refined later, so the old
placement need not serve the new traffic for long.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ObservedChange:
    """A change of traffic, and the plans made since."""

    steps: int
    """Newest steps since traffic changed; 0 if it did not."""
    steps_since_move: int | None
    """Newest steps under the present placement; None if unknown."""
    planned_steps: int | None
    """Steps since the newest change when the last plan was made; 0 if that plan knew of no change,
    None if there was no plan."""
    enough_steps: int
    """Steps after a change that are enough for a plan that need not be refined."""
    balance: float
    """Balance of the present placement since the change; NaN without a change."""
    balance_before: float
    """The same on as many steps just before the change."""

    def is_open(self, stop_above: float) -> bool:
        """Return True if balance is below `stop_above` since the change and no plan answered it.

        A plan that knew nothing of the change, or only of an older one, is no answer. A plan on few
        steps is a first answer (`may_refine`).
        """
        if self.steps == 0 or not self.balance < stop_above:
            return False
        moved, planned = self.steps_since_move, self.planned_steps
        if moved is None or self.steps <= moved or planned == 0:
            return True
        # The change that the last plan knew of is at least `planned + moved` steps old by now; half
        # of the first allows for another estimate of where it began.
        newer = planned is not None and self.steps < moved + planned / 2
        return newer or self.may_refine()

    def may_refine(self) -> bool:
        """Return True if the last plan was made on few steps, and now twice as many are known.

        The number of such plans stays small, as each needs twice the steps of the one before.
        """
        planned = self.planned_steps
        return planned is not None and 0 < planned < self.enough_steps and 2 * planned <= self.steps

    def is_urgent(self, stop_above: float, loss: float) -> bool:
        """Return True if the answer need not wait for the cooldown.

        The change must have cost the placement more than `loss` of its balance. A plan on few steps
        is refined without that.
        """
        if not self.is_open(stop_above):
            return False
        return self.may_refine() or self.balance_before - self.balance > loss
