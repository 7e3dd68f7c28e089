"""The KV cache as a value: extended without copying, branched and rolled back at will.

A cache is a list with one entry per block. Caches may share a buffer, in which each shows the first positions.

Why this is safe: rows after the longest living kv of a buffer are visible to nobody, so the longest may grow into them
in place; any other is first copied to a buffer of its own, and so is one whose room is used up, to one of twice its
length. No row that a cache shows is ever written again. Who lives is known by weak references. A view is noted under a
lock before its rows are written, so two threads never claim the same ones. (Keep the cache, not an array sliced out of
it: only the kv of a cache counts as living.)
At the end of the file: what a cache and the tokens to run must be like.
"""

import threading
import weakref
from typing import NamedTuple

import numpy as np

from sampling import checked_tokens

LOCK = threading.Lock()  # held while a view is noted, never while rows are written


class Entry(NamedTuple):
    """The cache of one block."""

    kv: np.ndarray  # keys kv[0] and values kv[1], [2, n_head, n_past, d_head] float32: a view of a buffer with room
    views: list  # weak references to the kv of every entry that shares the buffer

    def __reduce__(self):  # copy, deepcopy and pickle give an entry with a buffer of its own
        return entry_with, (np.array(self.kv),)


def view(buffer, n, views):
    """The entry that shows the first n positions of the buffer, [2, n_head, n_room, d_head]."""
    kv = buffer[:, :, :n]  # [2, n_head, n_room, d_head] -> [2, n_head, n, d_head]
    views.append(weakref.ref(kv, views.remove))  # it goes from the list when kv does
    return Entry(kv, views)


def empty_entry(n_head, d_head, n_room):
    """An entry of 0 positions with room for n_room. The memory is reserved now and touched only as it fills."""
    return view(np.empty((2, n_head, n_room, d_head), np.float32), 0, [])


def entry_with(kv):
    """An entry that holds a copy of kv, [2, n_head, n, d_head], and has no more room."""
    return extend(empty_entry(kv.shape[1], kv.shape[3], kv.shape[2]), kv)


def empty_cache(blocks, n_head, n_room):
    """A cache of 0 positions for the model of these blocks, with room for n_room positions."""
    n_embd = len(blocks[0]["ln_1"]["g"])
    return [empty_entry(n_head, n_embd // n_head, n_room) for _ in blocks]


def extend(entry, kv_new):
    """The entry with new positions after the old ones. kv_new: [2, n_head, n_new, d_head] float32."""
    kv, views = entry
    buffer, n_past, n_seq = kv.base, kv.shape[2], kv.shape[2] + kv_new.shape[2]
    _, n_head, n_room, d_head = buffer.shape
    with LOCK:
        longer = any((other := ref()) is not None and other.shape[2] > n_past for ref in tuple(views))
        grows = n_seq <= n_room and not longer
        if grows:
            entry = view(buffer, n_seq, views)
    if not grows:
        n_room = n_room if n_seq <= n_room else 2 * n_seq
        entry = view(np.empty((2, n_head, n_room, d_head), np.float32), n_seq, [])
        entry.kv[:, :, :n_past] = kv
    entry.kv[:, :, n_past:] = kv_new
    return entry


def cached_length(kvcache):
    """The number of positions that a cache holds; None is a cache of 0."""
    return kvcache[0].kv.shape[2] if kvcache else 0


def truncate(kvcache, n):
    """The cache of the first n positions. Copies nothing; ValueError if it holds fewer."""
    if not 0 <= n <= cached_length(kvcache):
        raise ValueError(f"can't cut a cache of {cached_length(kvcache)} positions to {n}")
    with LOCK:
        return [view(kv.base, n, views) for kv, views in kvcache]


def check(inputs, wte, wpe, blocks, n_head, kvcache):
    """ValueError where inputs and cache don't go together with each other or with the weights."""
    n_past, d_head = cached_length(kvcache), wte.shape[1] // n_head
    if kvcache is not None and len(kvcache) != len(blocks):
        raise ValueError(f"the cache has {len(kvcache)} blocks, the model {len(blocks)}")
    for i, (kv, _) in enumerate(kvcache or []):
        if kv.shape != (2, n_head, n_past, d_head):
            got = f"{kv.shape[2]} positions of {kv.shape[1]} heads of {kv.shape[3]} channels"
            raise ValueError(f"block {i} of the cache has {got}, not {n_past} of {n_head} of {d_head}")
    if n_past >= len(inputs):
        raise ValueError(f"nothing to run: {n_past} positions are cached, inputs has {len(inputs)} tokens")
    if len(inputs) > len(wpe):
        raise ValueError(f"inputs has {len(inputs)} tokens, the model's window n_ctx {len(wpe)}")
    checked_tokens(inputs[n_past:], len(wte))
