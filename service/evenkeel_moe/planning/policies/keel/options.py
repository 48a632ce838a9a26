"""Every constant of keel, in one place.

The defaults were chosen by walk-forward tests on recorded traces, see docs/policies.md. Prices and
gains are shares of a time, so one set of defaults serves models and fleets of all sizes.
"""

from dataclasses import dataclass

from evenkeel_moe.errors import InvalidInput
from evenkeel_moe.planning.problem.survival import Survive

_SHARES = ("stickiness", "caution", "max_caution", "foresight", "origin_trust", "move_share")
"""Fields that must be in [0, 1)."""


@dataclass(frozen=True, slots=True)
class KeelOptions:
    """The constants of keel. Operators may set `stickiness`, `caution` and `survive`.

    Units: a "layer time" is the time of one layer if load were spread perfectly over the ranks,
    and the "time of the mean slot" is that divided by the slots of a rank.
    """

    # The price of a copy.
    stickiness: float = 0.0025
    """Gain per step that one copy must bring, as a share of the time of the mean slot. Too low:
    copies for gains that do not last. Too high: real gains are left."""
    caution: float = 0.225
    """Further gain that it must bring, over the square root of the tokens that the mean slot saw in
    the window (counted as fewer where they come by the request). With few tokens most of an
    apparent gain is chance: too low a value follows it, too high a value waits for more data than
    there is. A `cost_per_move` above both together replaces them."""
    max_caution: float = 0.03
    """Bound on the caution, as a share of the time of the mean slot. Without it, loads given as
    shares instead of tokens would forbid every copy."""
    full_price_ranks: int = 12
    """Ranks up to which a copy has the whole price. With more it falls in proportion.
    Too low: copies for chance gains. Too high: after a change of traffic large fleets stay out of
    balance, because no copy pays alone."""
    active_caution: float = 1.35
    """Factor on the caution where times depend on which experts are active: where reading
    dominates, and under `fewest` dispatch. Too low: more copies for no less time."""
    fill_price: float = 2.0
    """Price, over that of other copies, of a replica that fills a slot under `fewest` dispatch."""
    noise_exponent: float = 0.7
    """Exponent that turns the noise of loads into the noise of a move's gain. The base is how much
    more the blocks of a window differ than if tokens came one by one. 1 would mean that gains are
    as noisy as loads, 0 that they have no extra noise. Too high: too much caution."""

    # The failures to survive.
    survive: Survive = Survive.NONE
    """Keeps replicas in two ranks, or two nodes, of as many experts as slots allow, the hottest
    first."""

    # The steps to plan for.
    foresight: float = 0.125
    """Share of the squared error of the window's mean that a forecast must have saved within the
    window to be used. Too low: the plan follows forecasts that fit by chance. 1 or nearly 1: never
    used."""
    volume_spread: float = 4.0
    """The number of tokens in a step is varied by this multiple of its relative standard deviation
    between parts of the window, where replicas have work of their own. Too low: a plan for as many
    tokens as now. Too high: a plan for numbers that never come."""
    origin_trust: float = 0.25
    """Share of the difference between an expert's origins in the window and even origins that is
    expected to last. A window has few requests, which live on few ranks. Too high: the plan fits
    those requests."""

    # The search.
    near_start: float = 1.25
    """Cost over that of the best start up to which a search begins from a start, if copies are
    free. Too low: better plans from other starts are not found. Time grows with it."""
    single_reading: float = 0.6
    """A search also begins without replicas where reading an expert takes longer than so many times
    computing its mean tokens: few replicas pay there, and adding those finds them better than
    dropping the others. Too low: by chance a window favours few replicas, with which the coming
    steps vary more. Too high: too many replicas."""
    doublings: int = 3
    """p of the norm is 2 to this power, 8, where loads are noisy: it fits little of the noise of
    single steps. Too high: the plan fits noise. Too low: the slowest rank counts too little."""
    sharp_doublings: int = 5
    """The same where loads are not noisy: 32 is nearer to the maximum, which many ranks share."""
    sharp_tokens: int = 16_384
    """Tokens of a rank in one step from which the sharp norm is used: their number is no chance."""
    listed: int = 200
    """A pass lists so many moves by their promise. Too low: none of them may gain."""
    trials: int = 100
    """A pass computes so many exact gains, and more until one is enough. Too low: good moves that
    promise little are not found. Time grows with it."""
    move_share: float = 0.1
    """A move is made in the same pass if it gains this share of the best one. Too low: moves that
    undo each other. Nearly 1: slow, one move a pass."""
    least_gain: float = 1e-5
    """Smallest gain of a move in layer times: rounding could keep the search going."""
    price_levels: tuple[float, ...] = (4.0, 2.0)
    """Prices of the descents before the one at the final price, over that price: the copies that
    save most come first."""
    shared_levels: tuple[float, ...] = (0.064, 0.032, 0.016, 0.008, 0.004, 0.002, 0.001, 0.0005)
    """Prices, in layer times, of the descents before the one at the final price where layers share
    a limit on copies: those that save most, in all layers, come first. Too few: the limit is spent
    on worse copies."""
    slot_price: float = 0.03
    """Price of a filled slot in layer times, before the descent at no price, in a second search
    where layers share slots: a replica that saves less makes room for one that saves more in
    another layer."""
    layer_effort: int = 48_000_000_000
    """Bounds the exact gains that one search of a layer computes, times the cube of its slots:
    2,000 gains with 288 slots, 54 with 960. Too low: large layers are left unfinished."""
    counted_size: int = 128 * 1024
    """Experts x ranks of a layer beyond which only numbers of copies are searched if every rank has
    one slot, even where copies between nodes cost more."""
    merged_size: int = 128 * 64 * 256
    """Experts x ranks x steps of a layer up to which its search looks at every step. Beyond it
    neighbouring steps are merged."""

    def __post_init__(self) -> None:
        for name in _SHARES:
            if not 0 <= getattr(self, name) < 1:
                raise InvalidInput(f"{name} is {getattr(self, name)}, must be in [0, 1)")


DEFAULT_OPTIONS = KeelOptions()
