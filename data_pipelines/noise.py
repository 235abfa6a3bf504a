"""Random numbers by counter: each is a hash of (seed, epoch, example, counter), so no generator carries state.

A key absorbs its numbers through SplitMix64's finaliser (Steele, Lea and Flood 2014, with the constants of Stafford's
variant 13). The key's halves then steer a 32-bit mixer over the counters: the multiply-xorshift of Wellons'
hash-prospector search ("lowbias32": shifts 16, 15, 16), with the low half added before the first round and the high
half xored in between the two. So two rows share a sequence only if all 64 bits of their keys agree.

Different uses of one key take different streams: disjoint ranges of the counter, which a layout numbers. Keys for other
purposes have a name among their numbers.
"""

import functools
import hashlib

import numpy as np

GAMMA = 0x9E3779B97F4A7C15  # 2**64 / golden ratio, SplitMix64's increment
MASK = 0xFFFFFFFFFFFFFFFF
STREAM = 1 << 24  # counters per stream; positions in a row stay far below it


def key(*numbers: int | str | np.ndarray) -> int | np.ndarray:
    """Hash a sequence of numbers and names to 64 bits: an int, or uint64 [n] as soon as one is an int64 array [n]."""
    state = 0
    for number in numbers:
        number = _of_name(number) if isinstance(number, str) else number
        number = number & MASK if isinstance(number, int) else number.view(np.uint64)
        state = _mix64(((state + GAMMA) & MASK) ^ number)
    return state


@functools.cache
def _of_name(name):
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def _mix64(x):
    """64 bits to 64 bits, int or uint64 array: a bijection in which every input bit moves every output bit."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def counters(stream: int, count: int) -> np.ndarray:
    """Return the first `count` counters of a stream, 0 .. 255, of a key: uint32 [count]."""
    return np.arange(stream * STREAM, stream * STREAM + count, dtype=np.uint32)


def bits(keys: int | np.ndarray, counters: np.ndarray) -> np.ndarray:
    """Return 32 random bits for each counter under its key: uint32.   keys: an int, for counters uint32 [n], or uint64
    [n], for counters uint32 [m] or [n, m]: then [n, m]."""
    if isinstance(keys, int):
        low, high = np.uint32(keys & 0xFFFFFFFF), np.uint32(keys >> 32)
    else:
        low, high = (half[:, None] for half in (keys.astype(np.uint32), (keys >> 32).astype(np.uint32)))
    x = counters + low
    shifted = x >> 16
    x ^= shifted
    x *= 0x7FEB352D
    x ^= high
    np.right_shift(x, 15, out=shifted)
    x ^= shifted
    x *= 0x846CA68B
    np.right_shift(x, 16, out=shifted)
    x ^= shifted
    return x


def each(keys: int | np.ndarray, counters: np.ndarray) -> np.ndarray:
    """Return 32 random bits for each counter (uint32 [n]), under one key or one each (uint64 [n]): uint32 [n]."""
    return bits(keys, counters) if isinstance(keys, int) else bits(keys, counters[:, None])[:, 0]


def below(bits: np.ndarray, bound: int | np.ndarray) -> np.ndarray:
    """Return whole numbers uniform in 0 .. bound - 1, int64, from uint32 bits (Lemire 2019, without rejection).
    bound: integer or int64 array, at least 1 and at most 2**31; the bias is at most bound / 2**32."""
    return (bits.astype(np.int64) * bound) >> 32
