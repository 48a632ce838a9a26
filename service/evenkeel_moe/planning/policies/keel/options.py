"""Every constant of keel, in one place.

The defaults were chosen by walk-forward tests on recorded traces, see docs/policies.md. Prices and
gains are shares of a time, so one set of defaults serves models and fleets of all sizes.
"""

from dataclasses import dataclass, field

from evenkeel_moe.errors import InvalidInput
from evenkeel_moe.planning.signals.change_detection import ChangeRules

_SHARES = (
    "stickiness",
    "caution",
    "max_caution",
    "few_share",
    "few_stickiness",
    "active_few_share",
    "active_few_stickiness",
    "first_stickiness",
    "restart_gain",
    "restart_gain_moving",
    "equal_speed_tolerance",
    "foresight",
    "refine_reserve",
    "refine_gain",
    "even_reserve",
    "reading_at_start",
    "optimal_gain",
    "layer_choice_reserve",
    "least_gain",
    "swap_share",
)
"""Fields that must be in [0, 1)."""


@dataclass(frozen=True, slots=True)
class KeelOptions:
    """The constants of keel, grouped by what they decide.

    Units: a "layer time" is the time of one layer if load were spread perfectly over the ranks,
    and the "time of the mean slot" is that divided by the slots of a rank.
    """

    # The price of a copy.
    stickiness: float = 0.003
    """Gain per step that one copy must bring, as a share of the time of the mean slot. Too low:
    copies for gains that do not last. Too high: real gains are left."""
    caution: float = 0.25
    """Further gain that it must bring, over the square root of the tokens that the mean slot saw in
    the window (counted as fewer where they come by the request). With few tokens most of an
    apparent gain is chance: too low a value follows it, too high a value waits for more data than
    there is. A `cost_per_move` above both together replaces them."""
    max_caution: float = 0.03
    """Bound on the caution, as a share of the time of the mean slot. Without it, loads given as
    shares instead of tokens would forbid every copy."""
    active_caution: float = 1.35
    """Factor on the caution where times depend on which experts are active: where reading
    dominates, and under `fewest` dispatch. Too low: more copies for no less time."""
    fill_price: float = 2.0
    """Price, over that of other copies, of a replica that fills a slot under `fewest` dispatch."""
    few_share: float = 0.028
    """Share of the slots that may change at the price `few_stickiness`: so few copies cost little
    even if chance chose them. Too high: many copies at a price that does not cover their noise."""
    few_stickiness: float = 0.0055
    """Gain that each of those copies must bring, in the unit of `stickiness`; without caution. A
    `cost_per_move` still holds."""
    active_few_share: float = 0.05
    """`few_share` where a replica has work of its own, such as reading its weights."""
    active_few_stickiness: float = 0.001
    """`few_stickiness` there. The part of a time that is reading does not move with the tokens, so
    gains are smaller, and so is their noise."""
    first_stickiness: float = 0.0
    """Gain per step, in layer times, that a copy must bring in the first plan after an engine's
    start. That gain lasts, so a high value only loses it."""
    noise_exponent: float = 0.7
    """Exponent that turns the noise of loads into the noise of a move's gain. The base is how much
    more the blocks of a window differ than if tokens came one by one. 1 would mean that gains are
    as noisy as loads, 0 that they have no extra noise. Too high: too much caution."""

    # The first plan.
    restart_gain: float = 0.003
    """Share of the window's time that a plan from nothing must save over a plan from the engines'
    start, which needs fewer copies. Where ranks differ in speed, and under Waterfill, any saving
    suffices."""
    restart_gain_moving: float = 0.01
    """The same where loads drift: the plan that fits the window best is not the best for long."""
    reading_at_start: float = 0.75
    """Time of reading, as a share of computing the mean replica's tokens in the half of the steps
    with the fewest, from which the first plan starts without replicas. Too low: replicas that would
    even out the coming loads are left out. Too high: replicas that cost reading stay."""
    equal_speed_tolerance: float = 0.01
    """Share by which the slowest rank's time per token may exceed the fastest rank's if the ranks
    count as equally fast. Too low: measurement noise counts as a difference."""

    # The steps to plan for.
    foresight: float = 0.125
    """Share of the squared error of the window's mean that a forecast must have saved within the
    window to be used. Too low: the plan follows forecasts that fit by chance. 1 or nearly 1: never
    used."""
    volume_spread: float = 4.0
    """The number of tokens in a step is varied by this multiple of its relative standard deviation
    between parts of the window, where replicas have work of their own. Too low: a plan for as many
    tokens as now. Too high: a plan for numbers that never come."""
    change: ChangeRules = field(default_factory=ChangeRules)
    """The weights of the window's steps."""

    # Dispatch other than even.
    origin_trust: float = 0.25
    """Share of the difference between an expert's origins in the window and even origins that is
    expected to last. A window has few requests, which live on few ranks. Too high: the plan fits
    those requests."""
    refine_reserve: float = 0.25
    """Share of the evaluations kept for refining a plan for nearest dispatch."""
    refine_gain: float = 0.003
    """Gain in layer times, copies paid, that the refinement of a layer must promise; less is mostly
    chance."""
    even_reserve: float = 0.5
    """Share of the evaluations kept, under optimal dispatch, for the search under an even split."""
    optimal_gain: float = 0.005
    """Share of the window's time under optimal dispatch that the plan searched for it must save
    over the plan searched for an even split; less is mostly chance."""

    # The search.
    smooth_doublings: int = 3
    """p of the norm is 2 to this power, 8, where loads are noisy: it fits little of the noise of
    single steps. Too high: the plan fits noise. Too low: the slowest rank counts too little. 8 and
    32 have kernels written out for speed."""
    sharp_doublings: int = 5
    """The same where loads are not noisy: 32 is nearer to the maximum, which many ranks share. More
    than `smooth_doublings`."""
    sharp_tokens: int = 16_384
    """Tokens of a rank in one step from which the sharp norm is used: their number is no chance."""
    least_gain: float = 1e-6
    """Smallest gain of a move in layer times. Less is not worth a place in a move limit, and
    rounding could keep the search going."""
    swap_share: float = 0.1
    """With the sharp norm, and in large layers, many ranks wait for one move each. Swaps that gain
    this share of the best one are made with it. Too low: swaps that undo each other. 1: slow, one
    swap per pass."""
    price_levels: tuple[float, ...] = (4.0, 2.0, 1.0)
    """Prices of a search's passes over its final price: the copies that save most come first."""
    limited_top_price: float = 0.05
    """With a move limit, the price of the first pass in layer times."""
    limited_price_ratio: float = 6.0
    """With a move limit, the price of a pass over that of the next one."""
    limited_passes: int = 6
    """With a move limit, the number of passes before the one at the final price. Fewer passes or
    larger steps of the price spend the limit on worse copies."""
    layer_choice_reserve: float = 0.5
    """With a layer limit, the share of the evaluations kept for the layers that may change, after
    all layers were searched to choose them."""

    # The evaluation budget. Time grows with it; with too small a budget layers are left unfinished.
    least_evaluations: int = 2_000_000
    """Candidates that one plan may evaluate at the least."""
    pooled_size: int = 1 << 15
    """Layers x experts x ranks up to which `least_evaluations` is one pool for all layers. Replans
    of that size use at most a sixth of it."""
    layer_evaluations: int = 300_000
    """Candidates per layer in larger models, at least `least_evaluations` divided by the layers. A
    strongly skewed layer of 256 experts needs 175,000 from the engines' start on 32 ranks, and more
    on 64."""
    common_layer_size: int = 256 * 64 * 256
    """Experts x ranks x steps of a layer up to which its search looks at every step. Beyond it
    neighbouring steps are merged, and `layer_evaluations` falls with the cube of the size."""
    many_starts_size: int = 64 * 64 * 16
    """Experts² x ranks of a layer up to which it is searched from more than one start. A search of
    noisy loads takes one to three evaluations per unit of it, so larger layers have enough for one.
    Too high: the first search leaves none for a better start."""
    counted_layer_size: int = 1 << 15
    """Experts x steps up to which the search looks at every step of a layer where only the numbers
    of copies count (`copy_counts`). Too high: slow. Too low: changes within a few steps are
    lost."""
    large_evaluations: int = 1_000_000
    """`least_evaluations` of a plan with such layers. These take about a second."""

    def __post_init__(self) -> None:
        for name in _SHARES:
            if not 0 <= getattr(self, name) < 1:
                raise InvalidInput(f"{name} is {getattr(self, name)}, must be in [0, 1)")
        if not 0 < self.smooth_doublings < self.sharp_doublings:
            raise InvalidInput(
                f"smooth_doublings {self.smooth_doublings} must be positive and below"
                f" sharp_doublings {self.sharp_doublings}"
            )


DEFAULT_OPTIONS = KeelOptions()
