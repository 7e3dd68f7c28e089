"""A prompt's cache in a file, so that the next run begins where the prompt ends.

The file is four arrays, one after the other as np.save writes them: the fingerprint of the other three; that of the
model; the ids of the cached tokens, [n] int32; their keys and values, [n_layer, 2, n_head, n, d_head] float32. It is
only ever replaced whole, and by one that begins with what it held. Whatever goes wrong with it, the text comes.
"""

import hashlib
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np

from kvcache import cached_length, empty_cache, extend

N_WORDS = 2**13  # words of 8 bytes in a block of what is fingerprinted
PIECE = 2**21  # bytes that a thread takes at once: few enough for a core's cache
KEYS = np.frombuffer(hashlib.shake_128(b"prompt cache").digest(16 * N_WORDS), np.uint64).reshape(2, N_WORDS)


def notice(path, what):
    print(f"prompt cache {path}: {what}", file=sys.stderr)


def leaves(name, tree):
    """(name, array) of every array in nested dicts and lists, in an order that depends on the names alone."""
    if isinstance(tree, dict | list):
        for key, value in sorted(tree.items()) if isinstance(tree, dict) else enumerate(tree):
            yield from leaves(f"{name}/{key}", value)
    else:
        yield name, np.ascontiguousarray(tree)


def block_sums(content):
    """Bytes that differ where the content, [n] uint8, differs: two sums of every block of it, and what is left over.

    Mod 2^64, the sums of w * k and of w' * k' over the words w of a block: w' is w with its bytes in reverse order, k
    and k' are random numbers, one per place. If two blocks differ in bit r of byte b of a word, their first sums are
    equal by a chance of at most 2^(8b + r - 64), the second, where it is byte 7 - b, of 2^(8(7 - b) + r - 64), and both
    of 2^(2r - 72): 2^-58 if signs alone (r = 7) differ.
    """
    n = content.size // (8 * N_WORDS) * (8 * N_WORDS)
    words = content[:n].view(np.uint64).reshape(-1, N_WORDS)  # [n] -> [n_blocks, N_WORDS]
    sums = (words * KEYS[0]).sum(axis=1), (words.byteswap() * KEYS[1]).sum(axis=1)  # 2 of [n_blocks]
    return b"".join(part.tobytes() for part in (*sums, content[n:]))


def fingerprint(tree):
    """32 bytes, uint8, of nested dicts and lists of arrays: others if a bit, a name, a shape or the order differs."""
    # SHA-256 over all block sums: over the arrays themselves it takes twice as long, far longer on some processors
    named = list(leaves("", tree))
    total = hashlib.sha256(repr([(name, array.shape, array.dtype.str) for name, array in named]).encode())
    contents = [array.reshape(-1).view(np.uint8) for _, array in named]
    pieces = [content[i : i + PIECE] for content in contents for i in range(0, content.size, PIECE)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for sums in pool.map(block_sums, pieces):
            total.update(sums)
    return np.frombuffer(total.digest(), np.uint8)


def read_array(file):
    """The next array of an open file, mapped: nothing is copied, unpickled or larger than the file."""
    np.lib.format.read_magic(file)  # ValueError for other files
    shape, _, dtype = np.lib.format.read_array_header_1_0(file)
    if dtype.hasobject:
        raise ValueError("pickles")
    array = np.memmap(file, dtype, "r", file.tell(), shape)
    file.seek(array.offset + array.nbytes)
    return array


def read_prompt(path, tokens, model):
    """kv of the tokens that the file begins with too, mapped, and whether it holds no more; None, True without a file.

    ValueError or OSError if it can't be used. To be copied at once: who reads what another program cuts off is killed.
    """
    if not os.path.exists(path):
        return None, True
    if not os.path.isfile(path):  # opening a pipe would wait for its other end
        raise ValueError("not a file")
    with open(path, "rb") as file:
        try:
            check, made_by, saved, kv = (read_array(file) for _ in range(4))
            fit = (made_by.dtype, saved.dtype, kv.dtype, kv.shape[3:4]) == (np.uint8, np.int32, np.float32, saved.shape)
            if not fit or file.read(1) or not np.array_equal(check, fingerprint([made_by, saved, kv])):
                raise ValueError
        except Exception:  # NumPy raises half a dozen kinds
            raise ValueError("damaged, or not a prompt cache") from None
    if not np.array_equal(made_by, model):
        raise ValueError("made by another model")
    n = int(np.cumprod(saved[: len(tokens)] == np.asarray(tokens[: len(saved)])).sum())  # until the first that differs
    if n == 0:
        raise ValueError("holds another prompt")
    return kv[:, :, :, :n], n == len(saved)


def save_prompt(path, tokens, kvcache, model):
    """Writes the cache of the tokens beside the file, then renames it. ValueError or OSError if that can't be done."""
    target = os.path.realpath(path)  # a link stays one
    part = f"{target}.{os.urandom(8).hex()}.part"  # process ids are the same in all containers
    kv = np.stack([kv for kv, _ in kvcache])  # n_layer of [2, n_head, n, d_head] -> [n_layer, 2, n_head, n, d_head]
    content = [model, np.array(tokens, np.int32), kv]
    folder = os.open(os.path.dirname(target), os.O_RDONLY)
    try:
        with open(part, "x+b") as file:  # with a +, np.save writes in a way that says why it fails
            for array in (fingerprint(content), *content):
                np.save(file, array)
        with suppress(ImportError, OSError):  # where there are locks, runs take turns; 10 seconds at most
            import fcntl

            for _ in range(200):
                with suppress(BlockingIOError):
                    fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                time.sleep(0.05)
        if not read_prompt(target, tokens, model)[1]:  # again: it may hold more by now
            raise ValueError("another run has saved meanwhile")
        os.replace(part, target)
    finally:
        os.close(folder)
        with suppress(OSError):  # it has been renamed
            os.remove(part)
    notice(path, f"{len(tokens)} positions saved")


def prefill_with_file(path, tokens, params, n_head, prefill):
    """The cache of all tokens but the last; None if there are no others. prefill: gpt2_kvcache.prefill."""
    known, kvcache = tokens[:-1], None
    if len(known) == 0:
        return None
    model = fingerprint({"n_head": n_head, "params": params})
    try:
        kv, replaceable = read_prompt(path, known, model)
    except (OSError, ValueError) as error:
        kv, replaceable = None, False
        notice(path, f"{getattr(error, 'strerror', None) or error}; it is left alone: remove it to save this prompt")
    if kv is not None:
        empty = empty_cache(params["blocks"], n_head, len(params["wpe"]))
        kvcache = [extend(entry, block) for entry, block in zip(empty, kv, strict=True)]
        notice(path, f"{kv.shape[3]} of the prompt's {len(tokens)} tokens reused")
    if cached_length(kvcache) < len(known):
        _, kvcache = prefill(known, params, n_head, kvcache)
        try:
            if replaceable:
                save_prompt(path, known, kvcache, model)
        except (OSError, ValueError) as error:
            notice(path, f"not saved: {getattr(error, 'strerror', None) or error}")
    return kvcache
