"""The KV cache as a value: extended without copying, branched and rolled back at will.

A cache is a list with one entry per block. An entry is (kv, views). kv, [2, n_head, n_past, d_head] float32, holds the
keys kv[0] and values kv[1] of the first n_past positions; it is a view of a buffer that has room for more. Caches that
share a buffer share the list `views` of weak references, one to the kv of each (the one thing that calls change).

Why this is safe: rows after the longest living kv of a buffer are visible to nobody, so the longest may grow into them
in place; any other is first copied to a buffer of its own, and so is one whose room is used up, to one of twice its
length. No row that a cache shows is ever written again. (Keep the cache, not an array sliced out of it: only the kv of
a cache counts as living.)
At the end of the file: what a cache and the tokens to run must be like.
"""

import weakref

import numpy as np


def first_rows(buffer, n, views):
    """The entry that shows the first n positions of the buffer, [2, n_room, n_head, d_head]."""
    kv = buffer[:, :n].transpose(0, 2, 1, 3)  # [2, n_room, n_head, d_head] -> [2, n_head, n, d_head]
    views.append(weakref.ref(kv, views.remove))  # it goes from the list when kv does
    return kv, views


def empty_entry(n_head, d_head, n_room):
    """An entry of 0 positions with room for n_room. The memory is reserved now and touched only as it fills."""
    return first_rows(np.empty((2, n_room, n_head, d_head), np.float32), 0, [])


def empty_cache(n_layer, n_head, d_head, n_room):
    """A cache of 0 positions with room for n_room: n_ctx of them, or fewer where it's known how many there will be."""
    return [empty_entry(n_head, d_head, n_room) for _ in range(n_layer)]


def extend(entry, kv_new):
    """The entry with new positions after the old ones. kv_new: [2, n_head, n_new, d_head] float32."""
    kv, views = entry
    buffer, n_past, n_seq = kv.base, kv.shape[2], kv.shape[2] + kv_new.shape[2]
    n_room = buffer.shape[1]
    longer = any((other := view()) is not None and other.shape[2] > n_past for view in tuple(views))
    if longer or n_seq > n_room:
        buffer, views = np.empty((2, n_room if n_seq <= n_room else 2 * n_seq, *buffer.shape[2:]), np.float32), []
        buffer[:, :n_past] = kv.transpose(0, 2, 1, 3)  # [2, n_head, n_past, d_head] -> [2, n_past, n_head, d_head]
    buffer[:, n_past:n_seq] = kv_new.transpose(0, 2, 1, 3)  # [2, n_head, n_new, d_head] -> [2, n_new, n_head, d_head]
    return first_rows(buffer, n_seq, views)


def cached_length(kvcache):
    """The number of positions that a cache holds; None is a cache of 0."""
    return kvcache[0][0].shape[2] if kvcache else 0


def truncate(kvcache, n):
    """The cache of the first n positions. Copies nothing; ValueError if it holds fewer."""
    if not 0 <= n <= cached_length(kvcache):
        raise ValueError(f"can't cut a cache of {cached_length(kvcache)} positions to {n}")
    return [first_rows(kv.base, n, views) for kv, views in kvcache]


def check_tokens(tokens, n_vocab):
    """ValueError for an id that isn't in the vocabulary; NumPy would take -1 for the last one."""
    for token in tokens:
        if not 0 <= token < n_vocab:
            raise ValueError(f"token id {token} is outside the vocabulary of {n_vocab}")


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
    check_tokens(inputs[n_past:], len(wte))
