"""The input of the ranks: real text from this machine's Python, or recorded routing."""

import builtins
import keyword
import re
import sysconfig
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evenkeel_moe.engines.reference.model import VOCABULARY, WORD_KINDS, Model
from evenkeel_moe.errors import InvalidInput

_CODE_MODULES = (
    "argparse ast calendar configparser dataclasses datetime difflib doctest enum fractions"
    " inspect locale optparse pathlib pdb pickle pydoc smtplib socket statistics subprocess tarfile"
    " tempfile threading traceback turtle typing uuid zipfile"
).split()
_REQUESTS_PER_RANK = 16
_IDS_PER_KIND = VOCABULARY // WORD_KINDS
_WORD = re.compile(r"\w+|([^\w\s])\1*")
_CODE_WORDS = frozenset([*keyword.kwlist, *dir(builtins), "self", "args", "kwargs"]) - frozenset(
    ("and", "as", "for", "from", "if", "in", "is", "not", "object", "or", "type", "while", "with")
)


class Traffic(Protocol):
    """The source of tokens and their routing. Without requests, no token knows others."""

    def domain(self, step: int) -> str:
        """Return the name of the kind of text at a step."""
        ...

    def tokens(self, step: int, rank: int) -> Tensor:
        """Return (n,) int64 token ids of one rank's step."""
        ...

    def route(self, step: int, rank: int, layer: int, x: Tensor) -> Tensor:
        """Return (n, k) int64: the experts of each row of x, best first."""
        ...

    def before(self, step: int, rank: int) -> Tensor | None:
        """Return (n,) int64: the token before each one; None if that is the row before it."""
        return None

    def attend(self, layer: int, x: Tensor) -> Tensor:
        """Return the (n, D) input of a layer's experts, with what rows take from earlier tokens."""
        return x

    def end_step(self, final: Tensor) -> list[Mapping[str, Any]]:
        """Take the (n, D) result of a step; return the lines of the requests that have ended."""
        return []

    def state(self) -> Mapping[str, int]:
        """Return what the line of a step tells of requests."""
        return {}

    def stop_arrivals(self) -> None:
        """Take no request that arrives from now on: other ranks get it."""
        return

    def resume_arrivals(self) -> None:
        """Take requests again, also those that came since `stop_arrivals`."""
        return

    def drained(self) -> bool:
        """Return True if every request that has arrived has ended."""
        return True

    def give_up(self) -> list[Mapping[str, Any]]:
        """Drop the requests that have arrived and not ended; return their lines."""
        return []


def _hashed(text: str) -> NDArray[np.int64]:
    """Return (n,) int64 token ids: words and punctuation, hashed into the vocabulary."""
    words = [match[0] for match in _WORD.finditer(text)]
    unique = {
        word: _kind(word) * _IDS_PER_KIND + zlib.crc32(word.encode()) % _IDS_PER_KIND
        for word in set(words)
    }
    return np.array([unique[word] for word in words], np.int64)


def _kind(word: str) -> int:
    """Return the kind of a word, 0..WORD_KINDS-1, as an embedding would separate them."""
    first = word[0]
    if word.isdigit() or "_" in word:
        return 0
    if first in "()[]{}":
        return 1
    if first in ".,;!?":
        return 2
    if not first.isalnum():
        return 3
    if word in _CODE_WORDS:
        return 4
    if first.isupper():
        return 5
    return 6 if len(word) <= 3 else 7


@cache
def prose_tokens() -> NDArray[np.int64]:
    """Return the token ids of the Python language reference that comes with `pydoc`."""
    from pydoc_data.topics import topics  # half a megabyte: read only if it is used

    return _hashed("\n".join(topics[name] for name in sorted(topics)))


@cache
def code_tokens() -> NDArray[np.int64]:
    """Return the token ids of modules of the standard library."""
    library = Path(sysconfig.get_paths()["stdlib"])
    paths = [library / f"{name}.py" for name in _CODE_MODULES]
    found = [path for path in paths if path.is_file()]
    if not found:
        raise InvalidInput(f"{library} has no sources of the standard library")
    return _hashed("\n".join(path.read_text(encoding="utf-8") for path in found))


@dataclass(frozen=True, slots=True)
class TextTraffic(Traffic):
    """Prose up to a step, then code, and back if wanted; the model's own gates route it."""

    model: Model
    num_ranks: int
    tokens_per_step: int
    shift_at: int
    shift_back: bool = False
    """Change back and forth, every `shift_at` steps."""

    def domain(self, step: int) -> str:
        """Return `prose` or `code`."""
        if not self.shift_at or step < self.shift_at:
            return "prose"
        return "prose" if self.shift_back and step // self.shift_at % 2 == 0 else "code"

    def tokens(self, step: int, rank: int) -> Tensor:
        """Return the next tokens of a rank's requests; each request cycles through the text."""
        text = code_tokens() if self.domain(step) == "code" else prose_tokens()
        requests = min(_REQUESTS_PER_RANK, self.tokens_per_step)
        request = rank * requests + np.arange(requests)
        length = -(-self.tokens_per_step // requests)
        starts = request * len(text) // (self.num_ranks * requests) + step * length
        positions = (starts[:, None] + np.arange(length)).reshape(-1)[: self.tokens_per_step]
        return torch.from_numpy(text.take(positions, mode="wrap"))

    def route(self, step: int, rank: int, layer: int, x: Tensor) -> Tensor:
        """Return the choices of the layer's gate."""
        return self.model.route(layer, x)


@dataclass(frozen=True, eq=False, slots=True)
class RecordedTraffic(Traffic):
    """Routing of a recorded trace; the activations come from arbitrary token ids."""

    num_ranks: int
    tokens_per_step: int
    top_k: int
    seed: int
    ids: NDArray[np.int64] | None
    """(tokens, L, k) recorded experts; None if only counts were recorded."""
    counts: NDArray[np.float64] | None
    """(steps, L, E) recorded tokens per expert, the distribution that choices are drawn from."""

    def domain(self, step: int) -> str:
        """Return `trace`."""
        return "trace"

    def _rows(self, step: int, rank: int) -> NDArray[np.int64]:
        start = (step * self.num_ranks + rank) * self.tokens_per_step
        return np.arange(start, start + self.tokens_per_step, dtype=np.int64)

    def tokens(self, step: int, rank: int) -> Tensor:
        """Return token ids spread over the vocabulary, because the recording has no text."""
        return torch.from_numpy(self._rows(step, rank) * 2654435761 % VOCABULARY)

    def route(self, step: int, rank: int, layer: int, x: Tensor) -> Tensor:
        """Return the recorded ids in order, cyclically, or k experts drawn from the counts."""
        if self.ids is not None:
            return torch.from_numpy(self.ids[self._rows(step, rank) % len(self.ids), layer])
        assert self.counts is not None
        weights = self.counts[step % len(self.counts), layer]
        rng = np.random.default_rng((self.seed, step, rank, layer))
        # With Gumbel noise, the k largest keys are a draw without replacement by the counts.
        with np.errstate(divide="ignore"):
            keys = np.log(weights)[None, :] + rng.gumbel(size=(self.tokens_per_step, len(weights)))
        keys[:, weights == 0] = -1e9
        return torch.from_numpy(
            np.argsort(-keys, axis=1, kind="stable")[:, : self.top_k].astype(np.int64)
        )


def read_trace(path: str) -> tuple[NDArray[np.int64] | None, NDArray[np.float64] | None, int]:
    """Read recorded routing; `ids` are preferred to counts.

    Returns:
        (ids (tokens, L, k) or None, counts (steps, L, E) or None, top_k).

    Raises:
        InvalidInput: the file has neither `ids` nor `T`, or a wrong shape.
    """
    with np.load(path, allow_pickle=False) as archive:
        if "ids" in archive.files:
            ids = archive["ids"].astype(np.int64)
            if ids.ndim != 3:
                raise InvalidInput(
                    f"`ids` of {path} must be (tokens, layers, top_k), got {ids.shape}"
                )
            return ids, None, int(ids.shape[2])
        if "T" in archive.files:
            counts = archive["T"].astype(np.float64)
            if counts.ndim != 3 or "topk" not in archive.files:
                raise InvalidInput(
                    f"`T` of {path} must be (steps, layers, experts), with `topk` next to it"
                )
            return None, counts, int(archive["topk"])
    raise InvalidInput(f"{path} has neither `ids` nor `T`")
