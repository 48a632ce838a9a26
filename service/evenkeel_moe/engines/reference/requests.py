"""Requests that arrive over time, and the KV cache that bounds how many run at once.

The cache has the buffers that experts leave: one pool of memory for both. A buffer without an
expert is a block of the cache, with the keys and values of `d_ffn // layers` tokens in all layers.
A request is admitted once all blocks that it will need are free, in order of arrival, and gives
them back at its end.
"""

import math
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evenkeel_moe.engines.reference.model import Model
from evenkeel_moe.engines.reference.slots import KvBlocks, PooledWeights
from evenkeel_moe.engines.reference.traffic import Traffic, prose_tokens
from evenkeel_moe.errors import InvalidInput


@dataclass(frozen=True, eq=False, slots=True)
class Request:
    """One request: a slice of text, of which the model is given a prompt."""

    arrives_s: float
    """Seconds after the first step."""
    ids: NDArray[np.int64]
    """(n,) token ids: the prompt, then what the engine puts out. It follows the text, so that a
    request has the same tokens in every run."""
    prompt: int
    """Tokens of the prompt."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Mean lengths of requests; each is drawn from half to one and a half of its mean."""

    prompt: int
    output: int

    @property
    def most(self) -> int:
        """The tokens of the longest request."""
        return self.prompt + self.prompt // 2 + self.output + self.output // 2


def draw_requests(seed: tuple[int, ...], per_s: float, lengths: Lengths) -> Iterator[Request]:
    """Yield requests without end, with independent arrivals.

    Args:
        seed: of the draw.
        per_s: mean arrivals in a second.
        lengths: of prompt and output.
    """
    rng, text, at = np.random.default_rng(seed), prose_tokens(), 0.0
    while True:
        at += rng.exponential(1.0 / per_s)
        prompt, output = (
            int(rng.integers(-(-mean // 2), mean + mean // 2 + 1))
            for mean in (lengths.prompt, lengths.output)
        )
        start = rng.integers(len(text))
        ids = text.take(np.arange(start, start + prompt + output), mode="wrap")
        yield Request(at, ids, prompt)


class BlockPool(Protocol):
    """Gives out the blocks of a KV cache."""

    @property
    def free_buffers(self) -> int:
        """The number of blocks that nobody has."""
        ...

    def take(self, count: int) -> list[int] | None:
        """Return so many free blocks, which are then taken; None if fewer are free."""
        ...

    def give_back(self, buffers: Sequence[int]) -> None:
        """Make blocks free again."""
        ...


@dataclass(eq=False, slots=True)
class RunningRequest:
    """A request with blocks of the KV cache."""

    request: Request
    blocks: list[int]
    """Those that hold its keys and values, in order of position."""
    admitted_s: float
    done: int = 0
    """Tokens computed."""
    rows: int = 0
    """Tokens in the present step, after those."""
    first_s: float = 0.0
    """Seconds at which its first token was put out."""
    first_step: int = -1
    """The step that put it out; -1 before."""
    digest: int = 0
    """Checksum of all its activations after the last layer."""

    @property
    def span(self) -> NDArray[np.int64]:
        """(rows,) positions of its tokens in the present step."""
        return np.arange(self.done, self.done + self.rows)


class RunningRequests:
    """Admits requests by the free blocks of a KV cache, and gives each some tokens of a step.

    Args:
        pool: the blocks.
        requests: in order of arrival.
        most: tokens of the longest request.
        block_tokens: tokens of a block.
        tokens_per_step: most tokens in a step. Running requests come first, then prompts, in parts.
        clock: monotonic seconds.

    Raises:
        InvalidInput: the pool has too few free blocks for the longest request.
    """

    def __init__(
        self,
        pool: BlockPool,
        requests: Iterator[Request],
        most: int,
        block_tokens: int,
        tokens_per_step: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._pool, self._requests, self._clock = pool, requests, clock
        self._block_tokens, self._tokens_per_step = block_tokens, tokens_per_step
        self._next = next(requests, None)
        self._began: float | None = None
        self._arrivals_end_s = math.inf
        self.running: list[RunningRequest] = []
        """In order of admission."""
        longest = -(-most // block_tokens)
        if longest > pool.free_buffers:
            raise InvalidInput(
                f"a request needs {longest} blocks of {block_tokens} tokens, the experts leave"
                f" {pool.free_buffers}"
            )

    @property
    def all_ended(self) -> bool:
        """True if no request runs and none will come."""
        return self._next is None and not self.running

    @property
    def drained(self) -> bool:
        """True if no request runs or waits."""
        return not self.running and self._waiting() is None

    def stop_arrivals(self) -> None:
        """Take no request that arrives from now on; those that wait are admitted all the same."""
        self._arrivals_end_s = self.now()

    def resume_arrivals(self) -> None:
        """Take requests again, also those that came since `stop_arrivals`."""
        self._arrivals_end_s = math.inf

    def give_up(self) -> list[tuple[Request, int]]:
        """Drop the requests that run or wait; return each with its number of computed tokens."""
        left = [(one.request, one.done) for one in self.running]
        for one in self.running:
            self._pool.give_back(one.blocks)
        self.running = []
        while (request := self._waiting()) is not None:
            left.append((request, 0))
            self._next = next(self._requests, None)
        return left

    def make_room(self, count: int) -> None:
        """Take the blocks of the newest requests until so many are free; they begin again later."""
        while self.running and self._pool.free_buffers < count:
            newest = self.running.pop()
            self._pool.give_back(newest.blocks)
            after = () if self._next is None else (self._next,)
            self._next, self._requests = newest.request, chain(after, self._requests)

    def _waiting(self) -> Request | None:
        """Return the next request, if it has arrived and is to be served here."""
        request, last = self._next, min(self.now(), self._arrivals_end_s)
        return request if request is not None and request.arrives_s <= last else None

    def now(self) -> float:
        """Return seconds since the first step."""
        if self._began is None:
            self._began = self._clock()
        return self._clock() - self._began

    def begin_step(self) -> None:
        """Admit the requests that are there, and set the tokens of each for this step."""
        while (request := self._waiting()) is not None:
            blocks = self._pool.take(-(-len(request.ids) // self._block_tokens))
            if blocks is None:
                break
            self.running.append(RunningRequest(request, blocks, self.now()))
            self._next = next(self._requests, None)
        left = self._tokens_per_step
        for one in sorted(self.running, key=lambda one: one.done < one.request.prompt):
            one.rows = min(max(one.request.prompt - one.done, 1), left)
            left -= one.rows

    def end_step(self, step: int) -> list[RunningRequest]:
        """Count the tokens of the step as computed; return the requests that ended with it."""
        now, ended = self.now(), []
        for one in self.running:
            one.done += one.rows
            if one.first_step < 0 and one.done >= one.request.prompt:
                one.first_s, one.first_step = now, step
            if one.done == len(one.request.ids):
                self._pool.give_back(one.blocks)
                ended.append(one)
        self.running = [one for one in self.running if one.done < len(one.request.ids)]
        return ended


@dataclass(eq=False, slots=True)
class _Batch:
    """The rows of one step."""

    step: int = -1
    tokens: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    before: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    """(n,) token before each one in its request."""
    position: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    blocks: Tensor = field(default_factory=lambda: torch.empty(0, 1, dtype=torch.int64))
    """(n, b) blocks of each row's request, padded with the first."""


class RequestTraffic(Traffic):
    """Serves requests with a KV cache: some tokens of each admitted request in every step.

    Args:
        model: computes them.
        weights: the pool that experts and cache share.
        requests: in order of arrival.
        most: tokens of the longest request.
        tokens_per_step: most tokens in a step. Running requests come first, then prompts, in parts.
        clock: monotonic seconds.

    Raises:
        InvalidInput: the experts leave too few blocks for the longest request, or its attention
            would not be exact.
    """

    def __init__(
        self,
        model: Model,
        weights: PooledWeights,
        requests: Iterator[Request],
        most: int,
        tokens_per_step: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._model, self._blocks = model, KvBlocks(weights)
        self._keys, self._values = weights.kv_blocks()
        self.block_tokens = int(self._keys.shape[2])
        self._asked = RunningRequests(
            self._blocks, requests, most, self.block_tokens, tokens_per_step, clock
        )
        self._batch = _Batch()
        if 64 * model.d_model * (most + self.block_tokens) >= 2**24:
            raise InvalidInput(f"requests of {most} tokens leave the exact range of float32")

    def domain(self, step: int) -> str:
        """Return `requests`."""
        return "requests"

    def tokens(self, step: int, rank: int) -> Tensor:
        """Return the tokens of a step; the first call for a step admits requests."""
        if step != self._batch.step:
            self._asked.begin_step()
            self._batch = self._next_batch(step)
        return self._batch.tokens

    def before(self, step: int, rank: int) -> Tensor:
        """Return the token before each token of the step, in its request."""
        return self._batch.before

    def attend(self, layer: int, x: Tensor) -> Tensor:
        """Keep the keys and values of a layer's rows; add to each row the value it attends to.

        A row attends to one token of its request so far: that whose key is most like it. So sums
        stay exact. Keys are the activations, values the same in reverse order.
        """
        batch, size = self._batch, self.block_tokens
        if not len(x):
            return x
        own = batch.blocks.gather(1, batch.position[:, None] // size)[:, 0]
        self._keys[own, layer, batch.position % size] = x
        self._values[own, layer, batch.position % size] = x.flip(1)
        keys = self._keys[:, layer][batch.blocks].flatten(1, 2)
        at = torch.arange(keys.shape[1], device=x.device)
        # Scores are integers, so scaling them and subtracting the position makes each distinct.
        score = torch.bmm(keys, x[:, :, None])[:, :, 0] * len(at) - at
        score[at[None, :] > batch.position[:, None]] = -torch.inf
        chosen = score.argmax(dim=1)
        block = batch.blocks.gather(1, chosen[:, None] // size)[:, 0]
        return torch.floor((x + self._values[block, layer, chosen % size]) / 2)

    def end_step(self, final: Tensor) -> list[Mapping[str, Any]]:
        """Put out a token of each request whose prompt is done; return the requests that ended."""
        rows, at = final.cpu().numpy(), 0
        for one in self._asked.running:
            one.digest = zlib.crc32(rows[at : at + one.rows].tobytes(), one.digest)
            at += one.rows
        step = self._batch.step
        return [_line(one, self._asked.now(), step) for one in self._asked.end_step(step)]

    def state(self) -> Mapping[str, int]:
        """Return the numbers of running requests, and of free blocks."""
        return {"running": len(self._asked.running), "free_blocks": self._blocks.free_buffers}

    def stop_arrivals(self) -> None:
        """Take no request that arrives from now on; those that wait are admitted all the same."""
        self._asked.stop_arrivals()

    def resume_arrivals(self) -> None:
        """Take requests again, also those that came since `stop_arrivals`."""
        self._asked.resume_arrivals()

    def drained(self) -> bool:
        """Return True if no request runs or waits."""
        return self._asked.drained

    def give_up(self) -> list[Mapping[str, Any]]:
        """Drop the requests that run or wait; return their lines."""
        return [{**_told(request), "done": done} for request, done in self._asked.give_up()]

    def make_room(self, count: int) -> None:
        """Take the blocks of the newest requests until so many are free; they begin again later."""
        self._asked.make_room(count)

    def _next_batch(self, step: int) -> _Batch:
        running = self._asked.running
        if not running:
            return _Batch(step)
        spans = [one.span for one in running]
        pairs = list(zip(running, spans, strict=True))
        ids = np.concatenate([one.request.ids[span] for one, span in pairs])
        before = np.concatenate([one.request.ids[np.maximum(span - 1, 0)] for one, span in pairs])
        tables = np.repeat(block_tables(running), [one.rows for one in running], axis=0)
        arrays = (ids, before, np.concatenate(spans), tables)
        return _Batch(step, *(torch.from_numpy(one).to(self._model.device) for one in arrays))


def block_tables(running: Sequence[RunningRequest]) -> NDArray[np.int64]:
    """Return (n, b) blocks of each request, padded with its first one."""
    width = max(len(one.blocks) for one in running)
    return np.array([one.blocks + one.blocks[:1] * (width - len(one.blocks)) for one in running])


def _line(one: RunningRequest, now: float, step: int) -> Mapping[str, Any]:
    times = {
        "admitted_s": one.admitted_s,
        "first_s": one.first_s,
        "ended_s": now,
    }
    return {
        **_told(one.request),
        **{name: round(value, 6) for name, value in times.items()},
        "first_step": one.first_step,
        "ended_step": step,
        "digest": one.digest,
    }


def _told(request: Request) -> Mapping[str, Any]:
    return {
        "arrived_s": round(request.arrives_s, 6),
        "prompt": request.prompt,
        "output": len(request.ids) - request.prompt,
    }
