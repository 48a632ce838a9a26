"""Changes bytes at random: bits, lengths, repeats, and values that parsers find hard."""

import random

_HARD = (
    b"",
    b"\x00",
    b"\xff" * 8,
    b"\x80" * 9 + b"\x01",
    b"null",
    b"NaN",
    b"-1",
    b"1e999",
    b"9" * 400,
    b"0x" + b"f" * 5000,
    b"1" + b":59" * 400 + b".5",
    b'"',
    b"[" * 2000,
    b"{}",
    b"\xed\xa0\x80",
    b"\\ud800",
)


def mutated(rng: random.Random, data: bytes, other: bytes) -> bytes:
    """Return an input near `data`, sometimes with a part of `other`."""
    found = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4, 8))):
        at = rng.randrange(len(found) + 1)
        end = min(len(found), at + rng.choice((1, 1, 2, 4, 16, 64)))
        match rng.randrange(6):
            case 0 if at < len(found):
                found[at] ^= 1 << rng.randrange(8)
            case 1:
                found[at:end] = rng.randbytes(end - at)
            case 2:
                del found[at:end]
            case 3:
                found[at:at] = found[at:end] * rng.choice((1, 2, 50))
            case 4:
                found[at:end] = rng.choice(_HARD)
            case _:
                begin = rng.randrange(len(other) + 1)
                found[at:end] = other[begin : begin + end - at]
    return bytes(found[: 1 << 20])
