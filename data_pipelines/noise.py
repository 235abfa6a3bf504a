"""Random numbers by counter: each is a hash of (seed, epoch, example, counter), so no generator is carried
along.

A row's key absorbs (seed, epoch, example) through SplitMix64's finaliser (Steele, Lea and Flood 2014, with
the constants of Stafford's variant 13). The key's halves then steer a 32-bit mixer over the counters: the
multiply-xorshift of Wellons' hash-prospector search ("lowbias32": shifts 16, 15, 16), the low half added
before the first round, the high half xored in between the two, so that two rows share a sequence only if all
64 bits of their keys agree.

Different uses of one key take different streams: disjoint ranges of the counter.
"""

import numpy as np

GAMMA = np.uint64(0x9E3779B97F4A7C15)  # 2**64 / golden ratio, SplitMix64's increment
STREAM = 1 << 24  # counters per stream; positions in a row stay far below it


def keys(seed, *numbers):
    """uint64 [n], one key per row: a hash of an integer seed and of integers or int64 arrays [n] (or [1])."""
    state = mix64(np.array([(seed + int(GAMMA)) & 0xFFFFFFFFFFFFFFFF], np.uint64))
    for number in numbers:
        state = mix64((state + GAMMA) ^ np.asarray(number).astype(np.uint64))
    return state


def mix64(x):
    """uint64 [...] -> uint64 [...]: a bijection in which every input bit moves every output bit."""
    x = (x ^ (x >> 30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> 27)) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> 31)


def counters(stream, count):
    """uint32 [count]: the first counters of a stream (a small integer)."""
    return np.arange(stream * STREAM, stream * STREAM + count, dtype=np.uint32)


def bits(keys, counters):
    """32 random bits for each counter under its key: uint32, of the shape to which the two broadcast.

    keys: uint64 [n, 1], or whatever broadcasts; counters: uint32 [m] or [n, m].
    """
    x = counters + keys.astype(np.uint32)
    shifted = x >> 16
    x ^= shifted
    x *= np.uint32(0x7FEB352D)
    x ^= (keys >> 32).astype(np.uint32)
    np.right_shift(x, 15, out=shifted)
    x ^= shifted
    x *= np.uint32(0x846CA68B)
    np.right_shift(x, 16, out=shifted)
    x ^= shifted
    return x


def below(bits, bound):
    """Whole numbers uniform in 0 .. bound - 1, int64, from uint32 bits (Lemire 2019, without the rejection
    step).

    bound: integer or int64 array, at least 1 and at most 2**31; the bias is at most bound / 2**32.
    """
    return ((bits.astype(np.int64) & 0xFFFFFFFF) * bound) >> 32
