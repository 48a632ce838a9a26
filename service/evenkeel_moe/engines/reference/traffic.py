"""The input of the ranks: real text from this machine's Python."""

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

from evenkeel_moe.engines.reference.model import VOCABULARY, WORD_KINDS
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
    """The source of tokens. Without requests, no token knows others."""

    def domain(self, step: int) -> str:
        """Return the name of the kind of text at a step."""
        ...

    def tokens(self, step: int, rank: int) -> Tensor:
        """Return (n,) int64 token ids of one rank's step."""
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
    """Prose up to a step, then code, and back if wanted."""

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
