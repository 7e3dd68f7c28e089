"""TensorFlow's V2 checkpoints, read with NumPy alone; arrays are views of a memory map, so loading takes milliseconds.

A model directory holds `checkpoint`, a text file that names a prefix; `<prefix>.index`, a table that gives each
variable's type, shape and place; and `<prefix>.data-?????-of-?????`, one or more shards with the variables' bytes.
Formats: LevelDB's doc/table_format.md; TensorFlow's tensor_bundle.proto, tensor_shape.proto and types.proto.

Nothing in the files is trusted: whatever isn't as it should be raises DamagedFile, at little cost in time and memory.
"""

import math
import re
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from errors import DamagedFile
from model_files.crc32c import crc32c, masked
from model_files.leveldb_table import read_table, varints

# The largest GPT-2 has 580 variables and an index of 20 kB: these limits only keep a hostile index cheap.
MAX_INDEX_BYTES, MAX_DIMENSIONS = 256 * 1024, 32
# Field tags as they stand in the messages: field number * 8 + wire type (0 varint, 2 bytes, 5 four bytes).
N_SHARDS, ENDIANNESS, VERSION, MIN_CONSUMER = 0x08, 0x10, 0x1A, 0x10
DTYPE, SHAPE, SHARD, OFFSET, SIZE, CRC, SLICES = 0x08, 0x12, 0x18, 0x20, 0x28, 0x35, 0x3A
DIMENSION, DIMENSION_SIZE = 0x12, 0x08
DTYPES = {1: "float32", 2: "float64", 3: "int32", 4: "uint8", 5: "int16", 6: "int8", 8: "complex64", 9: "int64"}
DTYPES |= {10: "bool", 14: "bfloat16", 17: "uint16", 18: "complex128", 19: "float16", 22: "uint32", 23: "uint64"}


class Entry(NamedTuple):
    """What a variable is, and where: `size` bytes from `offset` on in the file `<prefix>.<shard>`."""

    dtype: str  # NumPy's name, "bfloat16", or for those that can't be read, "TensorFlow's type 7" (that is strings)
    shape: tuple[int, ...]
    shard: str  # "data-00000-of-00001"
    offset: int
    size: int
    crc32c: int  # masked, as stored


def find_prefix(model_dir):
    """The prefix of the checkpoint that `model_dir/checkpoint` names, for instance `model_dir/model-1000`.

    A path that isn't there (any more) is looked for in `model_dir` by its last component. Raises OSError.
    """
    path = Path(model_dir) / "checkpoint"
    line = re.search(rb'^[ \t]*model_checkpoint_path:[ \t]*"((?:[^"\\\n]|\\.)+)"', _read(path), re.MULTILINE)
    try:  # the escapes of protobuf's text format, such as \\ and \303\251, are Python's too
        named = line[1].decode("unicode_escape").encode("latin-1").decode("utf-8") if line else ""
    except UnicodeError:
        named = ""
    parts = re.split(r"[/\\]", named)  # the path may come from Windows
    if not parts[-1] or ".." in parts:
        raise DamagedFile(f"{path} doesn't name a checkpoint in its directory (model_checkpoint_path)")
    for prefix in (Path(model_dir) / named, Path(model_dir) / parts[-1]):
        if index_of(prefix).is_file():
            return prefix
    raise FileNotFoundError(f"{path} names {named!r}, but there is no {parts[-1] + '.index'!r} beside it")


def index_of(prefix):
    return Path(f"{prefix}.index")


def _read(path):
    """The bytes of a small file."""
    if not path.is_file():  # reading a pipe or a device might never end
        raise FileNotFoundError(f"{path} is missing")
    with path.open("rb") as file:
        content = file.read(MAX_INDEX_BYTES + 1)
    if len(content) > MAX_INDEX_BYTES:
        raise DamagedFile(f"{path} is larger than {MAX_INDEX_BYTES} bytes, which no GPT-2's is")
    return content


def _fields(message):
    """The (tag, value) pairs of a protobuf message; values are ints (varints) or bytes."""
    fields, at = [], 0
    while at < len(message):
        tag, at = varints(message, at, 1)
        wire_type = tag % 8
        if wire_type in (0, 2):
            value, at = varints(message, at, 1)
        elif wire_type in (1, 5):
            value = 8 if wire_type == 1 else 4
        else:
            raise ValueError(f"field tag {tag} is of an unknown kind")
        if wire_type != 0:  # the value so far is the length of the value
            value, at = message[at : at + value], at + value
        if at > len(message):
            raise ValueError(f"field tag {tag} is cut short")
        fields.append((tag, value))
    return fields


def _entry(value, n_shards):
    """The Entry in a BundleEntryProto."""
    fields = dict(_fields(value))
    if SLICES in fields:
        raise ValueError("it is stored in slices (a partitioned variable), which isn't supported")
    number, shard, offset, size = (fields.get(tag, 0) for tag in (DTYPE, SHARD, OFFSET, SIZE))
    dimensions = [value for tag, value in _fields(fields.get(SHAPE, b"")) if tag == DIMENSION]
    shape = tuple(dict(_fields(value)).get(DIMENSION_SIZE, 0) for value in dimensions[: MAX_DIMENSIONS + 1])
    # Negative numbers are stored plus 2**64, so here and below they are too large. Empty dimensions count as 1 in
    # this product, since NumPy wants the others possible even so.
    if len(shape) > MAX_DIMENSIONS or math.prod(n or 1 for n in shape) >= 2**58:
        raise ValueError(f"shape {shape} is impossible")
    dtype = DTYPES.get(number, f"TensorFlow's type {number}")
    if number in DTYPES and size != math.prod(shape) * _stored(dtype).itemsize:
        raise ValueError(f"{size} bytes aren't {dtype} of shape {shape}")
    if shard >= n_shards:
        raise ValueError(f"there is no shard {shard} of {n_shards}")
    crc = int.from_bytes(fields.get(CRC, b""), "little")
    return Entry(dtype, shape, f"data-{shard:05}-of-{n_shards:05}", offset, size, crc)


def _stored(dtype):
    return np.dtype("uint16" if dtype == "bfloat16" else dtype).newbyteorder("<")


def read_index(path):
    """The dict name -> Entry of all variables in an index (a Path), in its order. Doesn't look at the data files.

    Raises DamagedFile unless check sums are right, sizes fit shapes and no variables overlap; OSError if it is missing.
    """
    entries, where = {}, path
    try:
        (key, value), *pairs = read_table(_read(path)) or [(None, b"")]
        header = dict(_fields(value))
        if key != b"" or header.get(ENDIANNESS) or dict(_fields(header.get(VERSION, b""))).get(MIN_CONSUMER, 0) > 1:
            raise ValueError("its header is missing, or says big-endian or newer than V2, which aren't supported")
        for key, value in pairs:
            where = f"{path}: variable {key.decode(errors='replace')!r}"
            if key.startswith(b"\0"):  # how TensorFlow names slices
                raise ValueError("it is stored in slices (a partitioned variable), which isn't supported")
            entries[key.decode()] = _entry(value, header.get(N_SHARDS, 0))
        spans = sorted((e.shard, e.offset, e.offset + e.size, name) for name, e in entries.items() if e.size)
        for (shard, _, end, _), (next_shard, start, _, name) in pairwise(spans):
            where = f"{path}: variable {name!r}"
            if shard == next_shard and start < end:
                raise ValueError("it overlaps another one")
    except ValueError as error:
        raise DamagedFile(f"{where}: {error}") from None
    return entries


def shard_sizes(entries):
    """The dict shard -> length in bytes of its file, from the entries of a whole index."""
    sizes = {}
    for entry in entries.values():
        sizes[entry.shard] = max(sizes.get(entry.shard, 0), entry.offset + entry.size)
    return sizes


def load_variables(prefix, names=None):
    """The dict name -> array of the named variables, or of all: read-only views of a memory map.

    Values are tf.train.load_variable's, bit for bit; NumPy lacks bfloat16, so there its bits come as uint16.
    Raises ValueError for a name that the checkpoint lacks, OSError for files that are missing or damaged.
    """
    entries = read_index(index_of(prefix))
    names = list(entries if names is None else names)
    for name in names:
        if name not in entries:
            raise ValueError(f"{prefix}.index has no variable {name!r}")
    return _arrays(prefix, entries, names)


def load_weights(model_dir):
    """The dict name -> float32 array of the weights, the variables under `model/`, without that prefix.

    Dimensions of 1 in front of a matrix are dropped (OpenAI's are [1, n_in, n_out]). Arrays are read-only: views of
    the file, or copies where `widen` makes them. Raises OSError, DamagedFile for any other type than its three.
    """
    prefix = find_prefix(model_dir)
    entries = read_index(index_of(prefix))
    # A variable inside another, such as model/wte/Adam in model/wte, is what an optimizer keeps about it.
    names = [name for name in entries if name.startswith("model/") and name.rpartition("/")[0] not in entries]
    if not names:
        raise DamagedFile(f"{prefix}.index has no variable under 'model/': it isn't a GPT-2 checkpoint")
    weights = {}
    for name, array in _arrays(prefix, entries, names).items():
        dtype = entries[name].dtype
        if dtype not in ("float32", "float16", "bfloat16"):
            raise DamagedFile(f"{prefix}.index: variable {name!r} is {dtype}, where weights are float32")
        while array.ndim > 2 and array.shape[0] == 1:
            array = array[0]
        weights[name.removeprefix("model/")] = widen(array, dtype)
    return weights


def check_crc(index, data, on_bytes=None):
    """Compares every variable's bytes with its check sum in the index; raises DamagedFile at the first that differs.

    index: its Path. data: the Paths of its shards, in their order. on_bytes(n) is called after each n bytes that are
    read, at most 4 MB, which is also about the memory that it takes.
    """
    entries = read_index(index)
    files = dict(zip(sorted(shard_sizes(entries)), data, strict=True))
    _check_files(index, entries, entries, files)
    for name, entry in entries.items():
        crc, n_left = 0, entry.size
        with files[entry.shard].open("rb") as file:
            file.seek(entry.offset)
            while n_left and (part := file.read(min(n_left, 4 * 1024 * 1024))):
                crc, n_left = crc32c(part, crc), n_left - len(part)
                if on_bytes:
                    on_bytes(len(part))
        if masked(crc) != entry.crc32c:
            raise DamagedFile(f"{files[entry.shard]}: variable {name!r} doesn't match its check sum")


def _arrays(prefix, entries, names):
    """The dict name -> read-only view of its bytes, for some of an index's entries."""
    files = {shard: Path(f"{prefix}.{shard}") for shard in {entries[name].shard for name in names}}
    _check_files(index_of(prefix), entries, names, files)
    maps = {shard: map_file(path) for shard, path in files.items()}
    arrays = {}
    for name in names:
        dtype, shape, shard, offset, size, _ = entries[name]
        arrays[name] = maps[shard][offset : offset + size].view(_stored(dtype)).reshape(shape)
    return arrays


def map_file(path):
    """The bytes of a file (a Path) as a read-only memory map: uint8 [n_bytes]. They are read when they are used."""
    if path.stat().st_size == 0:  # can't be mapped
        return np.frombuffer(b"", np.uint8)
    return np.asarray(np.memmap(path, np.uint8, "r"))  # a plain array: its arithmetic is faster than a memmap's


def widen(array, dtype):
    """An array as float32, aligned and read-only: a view if it is aligned float32 already, else a copy.

    dtype is "float32", "float16" or "bfloat16", whose bits come as uint16.
    """
    if dtype == "bfloat16":
        array = (array.astype(np.uint32) << 16).view(np.float32)  # its bits are the upper half of a float32
    # A file may hold weights at odd addresses: copied once here, NumPy needn't copy them for every product.
    array = np.require(array, np.float32, "A").view()
    array.flags.writeable = False
    return array


def _check_files(index, entries, names, files):
    """OSError unless the named variables have types that can be read, and files (shard -> Path) of the right length."""
    for name in names:
        if entries[name].dtype not in DTYPES.values():
            raise DamagedFile(f"{index}: variable {name!r} is of {entries[name].dtype}, which isn't supported")
    sizes = shard_sizes(entries)
    for shard, name in {entries[name].shard: name for name in names}.items():
        path = files[shard]
        if not path.is_file():
            raise FileNotFoundError(f"{path}, which holds variable {name!r}, is missing")
        n_bytes = path.stat().st_size
        if n_bytes != sizes[shard]:
            last = max((e.offset + e.size, name) for name, e in entries.items() if e.shard == shard)[1]
            where = f"{path} has {n_bytes} bytes, but its last variable {last!r} ends at {sizes[shard]}"
            raise DamagedFile(f"{where}: it is cut short or belongs to another checkpoint")
