"""Threads go on from one cache, and drop caches of its buffer, at the same time; counts how many find wrong rows.

    .venv/bin/python tests/provoke_threads.py [continuations]      (100,000 unless told; no model is run)

The interpreter is told to switch threads as often as it can. With kvcache.LOCK taken away some are wrong.
"""

import random
import sys
import threading
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from kvcache import empty_entry, extend, truncate  # noqa: E402

SHAPE = (2, 2, 1, 4)  # [2, n_head, n_new, d_head]


def rows(n, value):
    return np.full((*SHAPE[:2], n, SHAPE[3]), value, np.float32)


def go_on(trunk, mine, rng):
    """Whether a continuation of the trunk shows its own rows and leaves the trunk's, however others go on from it."""
    kvcache = truncate(trunk, 2) if rng.random() < 0.2 else trunk
    n_past = kvcache[0].kv.shape[2]
    for n in range(rng.randrange(1, 4)):
        kvcache = [extend(kvcache[0], rows(1, mine + n / 8))]
        if rng.random() < 0.2:
            extend(trunk[0], rows(2, -2))  # and dropped at once
    written = kvcache[0].kv[:, :, n_past:]
    expected = mine + np.arange(written.shape[2], dtype=np.float32)[:, None] / 8
    return bool((written == expected).all() and (trunk[0].kv == -1).all())


def provoke(n_continuations, n_threads=4, seed=0):
    """How many of the continuations are wrong. In each round all threads go on from one trunk at once."""
    right, n_rounds, barrier = [], n_continuations // n_threads, threading.Barrier(n_threads)
    trunks = [[extend(empty_entry(2, 4, n_room=12), rows(3, -1))] for _ in range(n_rounds)]

    def go(number):
        rng = random.Random(seed * 1000 + number)
        for i, trunk in enumerate(trunks):
            barrier.wait(60)
            right.append(go_on(trunk, number * n_rounds + i, rng))

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=go, args=(number,)) for number in range(n_threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert len(right) == n_rounds * n_threads  # no thread has died
    return right.count(False)


if __name__ == "__main__":
    n = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    print(f"{provoke(n)} of {n} continuations wrong (GIL {getattr(sys, '_is_gil_enabled', lambda: True)()})")
