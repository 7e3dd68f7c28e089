"""The cache of a prompt to a file and back, so that the next run begins where the prompt ends.

The file is an .npz without pickles: `model`, a fingerprint of the weights; `tokens`, the ids of the cached positions;
`kv`, [n_layer, 2, n_head, n, d_head] float32. It is only ever replaced whole, and by one that begins with what it held.
"""

import hashlib
import io
import os
import sys
import zipfile
import zlib

import numpy as np

from kvcache import cached_length, empty_cache, extend

N_PLACES = 2039  # see fingerprint


def notice(path, what):
    print(f"prompt cache {path}: {what}", file=sys.stderr)


def leaves(name, tree):
    """(name, array) of every array in nested dicts and lists, in an order that depends on the names alone."""
    if isinstance(tree, dict | list):
        for key, value in sorted(tree.items()) if isinstance(tree, dict) else enumerate(tree):
            yield from leaves(f"{name}/{key}", value)
    else:
        yield name, tree


def fingerprint(params, n_head):
    """32 bytes, uint8, that differ between models: every weight counts, and its place.

    A check sum, on all cores, at the speed of memory: the numbers as integers, added at 2,039 places. (A row, 768 or 3
    times 768 numbers, doesn't fit that prime, so rows or entries that are swapped meet other places.) A real hash of
    the 498 MB of 124M's weights would take longer than what the saved prompt spares.
    """
    from concurrent.futures import ThreadPoolExecutor

    def sums(leaf):
        name, array = leaf
        numbers = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        n = numbers.size // (8 * N_PLACES) * 8 * N_PLACES
        added = np.add.reduce(numbers[:n].view(np.uint64).reshape(-1, N_PLACES), axis=0)  # [N_PLACES]
        return f"{name} {array.shape}".encode() + added.tobytes() + numbers[n:].tobytes()

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        content = b"".join(pool.map(sums, leaves("", params)))
    return np.frombuffer(hashlib.sha256(f"n_head {n_head}".encode() + content).digest(), np.uint8)


def read_members(path, names):
    """Arrays of an .npz file, as views of its memory map: nothing is copied, unpickled or larger than the file.

    ValueError if it isn't one, is compressed or damaged. Formats: PKWARE's APPNOTE 4.3.7 (a local header is 30 bytes
    and two fields whose lengths are its last numbers) and numpy.lib.format.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            members = [archive.getinfo(f"{name}.npy") for name in names]
        whole = np.memmap(path, np.uint8, "r")
        return [read_array(whole, member) for member in members]
    except OSError:
        raise
    except Exception as error:  # the zip and npy readers raise half a dozen kinds on damaged files
        raise ValueError(f"damaged, or not a prompt cache ({type(error).__name__})") from None


def read_array(whole, member):
    """The array of one member of a zip file. whole: the file's bytes, uint8."""
    lengths = whole[member.header_offset + 26 : member.header_offset + 30].view("<u2")
    start = member.header_offset + 30 + int(lengths.sum())
    content = whole[start : start + member.file_size]
    if member.compress_type != zipfile.ZIP_STORED or zlib.crc32(content) != member.CRC:
        raise ValueError("compressed or damaged")
    header = io.BytesIO(content[:1024].tobytes())
    if np.lib.format.read_magic(header) != (1, 0):
        raise ValueError("another version of the format")
    shape, in_fortran_order, dtype = np.lib.format.read_array_header_1_0(header)
    if in_fortran_order or dtype.hasobject or dtype.names:
        raise ValueError("not an array that was saved here")
    return content[header.tell() :].view(dtype).reshape(shape)


def read(path, params, n_head):
    """tokens [n] int32 and kv [n_layer, 2, n_head, n, d_head] float32 of a file; ValueError says why there are none."""
    n_layer, (n_ctx, n_embd) = len(params["blocks"]), params["wpe"].shape
    model, saved, kv = read_members(path, ["model", "tokens", "kv"])
    if saved.ndim != 1 or saved.dtype != np.int32 or saved.size > n_ctx or model.dtype != np.uint8:
        raise ValueError("damaged: its arrays don't fit together")
    if not np.array_equal(model, fingerprint(params, n_head)):
        raise ValueError("made by another model")
    if kv.shape != (n_layer, 2, n_head, saved.size, n_embd // n_head) or kv.dtype != np.float32:
        raise ValueError("damaged: its arrays don't fit together")
    return saved, kv


def load(path, tokens, params, n_head):
    """(cache of the tokens that the file begins with too, all but the last at most, or None; may it be replaced?).

    What can't be used is left alone, and a line on stderr says why.
    """
    if not os.path.exists(path):
        return None, True
    try:
        saved, kv = read(path, params, n_head)
    except ValueError as error:
        notice(path, f"{error}; it is left alone: remove it to save this prompt")
        return None, False
    n_both = min(len(saved), len(tokens) - 1)
    differs = np.flatnonzero(saved[:n_both] != np.asarray(tokens[:n_both]))
    n = int(differs[0]) if len(differs) else n_both
    notice(path, f"{n} of the prompt's {len(tokens)} tokens reused" if n else "holds another prompt; it is left alone")
    if n == 0:
        return None, False
    empty = empty_cache(params["blocks"], n_head, len(params["wpe"]))
    kvcache = [extend(entry, block[:, :, :n]) for entry, block in zip(empty, kv, strict=True)]
    return kvcache, n == len(saved)


def save(path, tokens, kvcache, params, n_head):
    """Writes the cache of these tokens: beside, then renamed."""
    part = f"{path}.{os.getpid()}.part"
    try:
        with open(part, "wb") as file:
            kv = np.stack([kv for kv, _ in kvcache])  # [n_layer, 2, n_head, n, d_head]
            np.savez(file, model=fingerprint(params, n_head), tokens=np.array(tokens, np.int32), kv=kv)
        os.replace(part, path)
    except OSError as error:
        raise OSError(f"can't write the prompt cache {path}: {error.strerror or error}") from None
    finally:
        if os.path.exists(part):
            os.remove(part)
    notice(path, f"{cached_length(kvcache)} positions saved")


def load_or_run(path, tokens, params, n_head, prefill):
    """The cache of all tokens but the last (None if there are no others): from the file as far as it goes, saved there.

    prefill: gpt2_kvcache.prefill.
    """
    (kvcache, replaceable), known = load(path, tokens, params, n_head), tokens[:-1]
    if cached_length(kvcache) < len(known):
        _, kvcache = prefill(known, params, n_head, kvcache)
        if replaceable:  # nothing is lost: the new cache begins with all of the old
            save(path, known, kvcache, params, n_head)
    return kvcache
