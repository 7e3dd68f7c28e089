"""The cache of a prompt to a file and back, so that the next run begins where the prompt ends.

The file is an .npz without pickles: `model`, a fingerprint of the weights; `tokens`, the ids of the cached positions;
`kv`, [n_layer, 2, n_head, n, d_head] float32. It is only ever replaced whole, and by one that begins with what it held.
"""

import hashlib
import os
import sys
import zipfile

import numpy as np

from kvcache import cached_length, empty_entry, extend


def notice(path, what):
    print(f"prompt cache {path}: {what}", file=sys.stderr)


def fingerprint(params, n_head):
    """32 bytes, uint8, that differ between models. Every weight counts (only rows of a matrix swapped don't show).

    The columns of all rows are combined by exclusive or, which runs at the speed of memory; a real hash of the 498 MB
    of 124M's weights would take longer than what the saved prompt spares.
    """
    digest = hashlib.sha256(f"n_head {n_head}".encode())

    def add(name, tree):
        if isinstance(tree, dict | list):
            for key, value in sorted(tree.items()) if isinstance(tree, dict) else enumerate(tree):
                add(f"{name}/{key}", value)
        else:
            rows = np.atleast_2d(tree).view(np.uint32)
            digest.update(f"{name} {tree.shape}".encode() + np.bitwise_xor.reduce(rows, axis=0).tobytes())

    add("", params)
    return np.frombuffer(digest.digest(), np.uint8)


def read_members(path, names):
    """The arrays of an .npz file. ValueError if it isn't one, is damaged or would need more memory than its size."""
    try:
        with zipfile.ZipFile(path) as archive:
            for info in archive.infolist():
                if info.compress_type != zipfile.ZIP_STORED or info.file_size > os.path.getsize(path):
                    raise ValueError("compressed")
                with archive.open(info) as member:
                    if np.lib.format.read_magic(member) != (1, 0):
                        raise ValueError("another version of the format")
                    shape, _, dtype = np.lib.format.read_array_header_1_0(member)
                    if dtype.hasobject or int(np.prod([dtype.itemsize, *shape], dtype=object)) > info.file_size:
                        raise ValueError("more elements than bytes")
        with np.load(path, allow_pickle=False) as arrays:
            return [arrays[name] for name in names]
    except OSError:
        raise
    except Exception as error:  # the zip and npy readers raise half a dozen kinds on damaged files
        raise ValueError(f"damaged, or not a prompt cache ({type(error).__name__})") from None


def load(path, tokens, params, n_head):
    """The cache of the tokens that the file begins with too, all but the last at most; None where there are none.

    What can't be used is left alone, and a line on stderr says why.
    """
    if not os.path.exists(path):
        return None
    n_layer, (n_ctx, n_embd) = len(params["blocks"]), params["wpe"].shape
    try:
        model, saved, kv = read_members(path, ["model", "tokens", "kv"])
    except ValueError as error:
        notice(path, f"{error}; it is left alone: remove it to save this prompt")
        return None
    if not np.array_equal(model, fingerprint(params, n_head)):
        notice(path, "made by another model; it is left alone: remove it to save this prompt")
        return None
    shape = (n_layer, 2, n_head, saved.size, n_embd // n_head)
    if saved.ndim != 1 or saved.dtype.kind != "i" or kv.shape != shape or kv.dtype != np.float32 or saved.size > n_ctx:
        notice(path, "damaged: its arrays don't fit together; it is left alone: remove it to save this prompt")
        return None
    n_both = min(len(saved), len(tokens) - 1)
    differs = np.flatnonzero(saved[:n_both] != np.asarray(tokens[:n_both]))
    n = int(differs[0]) if len(differs) else n_both
    notice(path, f"{n} of the prompt's {len(tokens)} tokens reused" if n else "holds another prompt; it is left alone")
    if n == 0:
        return None
    return [extend(empty_entry(n_head, n_embd // n_head, n_ctx), block[:, :, :n]) for block in kv]


def save(path, tokens, kvcache, params, n_head):
    """Writes the cache of these tokens, unless the file holds something that would be lost. Beside, then renamed."""
    if os.path.exists(path):
        try:
            model, saved = read_members(path, ["model", "tokens"])
        except ValueError:
            return
        begins_like_it = np.array_equal(saved, tokens[: len(saved)]) and len(saved) < len(tokens)
        if not begins_like_it or not np.array_equal(model, fingerprint(params, n_head)):
            return
    part = f"{path}.{os.getpid()}.part"
    try:
        with open(part, "wb") as file:
            kv = np.stack([kv for kv, _ in kvcache])  # [n_layer, 2, n_head, n, d_head]
            np.savez(file, model=fingerprint(params, n_head), tokens=np.array(tokens, np.int32), kv=kv)
        os.replace(part, path)
    finally:
        if os.path.exists(part):
            os.remove(part)
    notice(path, f"{cached_length(kvcache)} positions saved")


def load_or_run(path, tokens, params, n_head, prefill):
    """The cache of all tokens but the last (None if there are no others): from the file as far as it goes, saved there.

    prefill: gpt2_kvcache.prefill.
    """
    kvcache, known = load(path, tokens, params, n_head), tokens[:-1]
    if cached_length(kvcache) < len(known):
        _, kvcache = prefill(known, params, n_head, kvcache)
        save(path, known, kvcache, params, n_head)
    return kvcache
