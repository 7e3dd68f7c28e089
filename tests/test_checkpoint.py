"""The checkpoints in golden/checkpoints are TensorFlow's (make_checkpoint_golden.py); hostile ones are made here."""

import shutil
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from errors import DamagedFile
from model_files.checkpoint import (
    check_crc,
    find_prefix,
    index_of,
    load_variables,
    load_weights,
    map_file,
    read_index,
    shard_sizes,
    widen,
)
from model_files.crc32c import crc32c, masked

GOLDEN = Path(__file__).parent / "golden" / "checkpoints"
DATA = "data-00000-of-00001"


@pytest.fixture
def copy(tmp_path):
    """A function that copies a golden directory to where it may be damaged."""
    return lambda name: Path(shutil.copytree(GOLDEN / name, tmp_path / name))


# A small writer of tables and messages, for what TensorFlow doesn't write.


def varint(n):
    n %= 2**64
    return bytes([n & 127 | 128]) + varint(n >> 7) if n > 127 else bytes([n])


def field(tag, value):
    """tag % 8 is the wire type: 0 an int, 2 bytes, 5 four bytes."""
    if tag % 8 == 0:
        return bytes([tag]) + varint(value)
    return bytes([tag]) + (varint(len(value)) if tag % 8 == 2 else b"") + value


HEADER = field(0x08, 1) + field(0x1A, field(0x08, 1))


def entry(shape=(2, 3), dtype=1, shard=0, offset=0, size=24, crc=b"1234", more=b""):
    dims = b"".join(field(0x12, field(0x08, n)) for n in shape)
    numbers = field(0x08, dtype) + field(0x12, dims) + field(0x18, shard) + field(0x20, offset) + field(0x28, size)
    return numbers + field(0x35, crc) + more


def pairs_to_block(pairs):
    body, before = b"", b""
    for key, value in pairs:
        n = 0
        while n < min(len(key), len(before)) and key[n] == before[n]:
            n += 1
        body += varint(n) + varint(len(key) - n) + varint(len(value)) + key[n:] + value
        before = key
    return body


def table(*blocks, compression=b"\0", restarts=bytes(4) + b"\1\0\0\0", padding=b"\0", gaps=(b"", b"")):
    """A table of blocks of (key, value) pairs, or of their bytes, with right check sums; gaps: before and after all."""
    content, handles = gaps[0], []
    for block in [*blocks, [], None]:
        if block is None:  # the listing of the data blocks, which comes last
            block = [(b"k%03d" % i, handle) for i, handle in enumerate(handles[:-1])]
        block = (block if isinstance(block, bytes) else pairs_to_block(block)) + restarts
        handles.append(varint(len(content)) + varint(len(block)))
        content += block + compression + masked(crc32c(block + compression)).to_bytes(4, "little")
    content += gaps[1]
    return content + (handles[-2] + handles[-1]).ljust(40, padding) + bytes.fromhex("57fb808b247547db")


def write(folder, index, data=bytes(24)):
    """A model directory with this index; a dict name -> value is a good table of one block. Returns the prefix."""
    if isinstance(index, dict):
        index = table([(b"", HEADER), *((name.encode(), value) for name, value in index.items())])
    (folder / "checkpoint").write_text('model_checkpoint_path: "model.ckpt"\n')
    (folder / "model.ckpt.index").write_bytes(index)
    (folder / f"model.ckpt.{DATA}").write_bytes(data)
    return folder / "model.ckpt"


def data_files(folder):
    return sorted(folder.glob("*.data-*"))


def refused(folder, match, error=DamagedFile):
    """load_weights raises one line that names a file in the directory; returns the line."""
    with pytest.raises(error, match=match) as caught:
        load_weights(folder)
    line = str(caught.value)
    assert "\n" not in line and str(folder) in line
    return line


# What TensorFlow wrote reads as TensorFlow reads it.


@pytest.mark.parametrize("name", ["one_shard", "two_shards", "adam", "dtypes"])
def test_variables_equal_tensorflows_bit_for_bit(name):
    prefix = find_prefix(GOLDEN / name)
    variables = load_variables(prefix)
    with np.load(GOLDEN / name / "expected.npz") as expected:
        assert list(variables) == sorted(expected.files) == list(read_index(index_of(prefix)))
        for variable, array in variables.items():
            assert array.dtype == expected[variable].dtype and array.shape == expected[variable].shape
            assert array.tobytes() == expected[variable].tobytes()
    check_crc(index_of(prefix), data_files(GOLDEN / name))


def test_named_variables_come_alone_in_the_order_asked_for():
    names = ["model/wte", "model/wpe"]
    assert list(load_variables(GOLDEN / "one_shard" / "model.ckpt", names)) == names


def test_an_unknown_variable_is_a_value_error():
    with pytest.raises(ValueError, match="no variable 'model/wxe'"):
        load_variables(GOLDEN / "one_shard" / "model.ckpt", ["model/wxe"])


def test_arrays_are_read_only_plain_views_of_a_memory_map():
    variables, weights = load_variables(GOLDEN / "one_shard" / "model.ckpt"), load_weights(GOLDEN / "one_shard")
    for array in [*variables.values(), *weights.values()]:
        assert type(array) is np.ndarray and not array.flags.writeable
        while isinstance(array.base, np.ndarray):
            array = array.base
        assert isinstance(array, np.memmap)


def test_entries_tell_type_shape_and_place():
    entries = read_index(GOLDEN / "two_shards" / "model.ckpt.index")
    assert entries["model/wte"][:3] == ("float32", (11, 4), "data-00001-of-00002")
    for shard, size in shard_sizes(entries).items():
        assert (GOLDEN / "two_shards" / f"model.ckpt.{shard}").stat().st_size == size


def test_weights_lose_their_prefix_and_leading_ones():
    weights = load_weights(GOLDEN / "one_shard")
    assert weights["wte"].shape == (11, 4) and weights["h1/mlp/c_fc/w"].shape == (4, 16)
    with np.load(GOLDEN / "one_shard" / "expected.npz") as expected:
        assert {f"model/{name}" for name in weights} == set(expected.files)
        assert np.array_equal(weights["h0/attn/c_attn/w"], expected["model/h0/attn/c_attn/w"][0])


def test_a_matrix_of_one_row_keeps_its_row(tmp_path):
    write(tmp_path, {"model/w": entry((1, 1, 6))})
    assert load_weights(tmp_path)["w"].shape == (1, 6)


def test_global_step_and_adams_slots_are_ignored():
    assert {"global_step", "model/wte/Adam", "model/wte/Adam_1"} <= read_index(
        GOLDEN / "adam" / "model-1000.index"
    ).keys()
    assert set(load_weights(GOLDEN / "adam")) == {"wte", "h0/attn/c_attn/w"}


def test_half_precision_is_widened_to_float32():
    weights = load_weights(GOLDEN / "dtypes")
    with np.load(GOLDEN / "dtypes" / "expected.npz") as expected:
        assert np.array_equal(weights["half"], expected["model/half"][0, 0])
        assert np.array_equal(weights["brain"].view(np.uint32) >> 16, expected["model/brain"])
        assert not np.any(weights["brain"].view(np.uint32) & 0xFFFF)
    assert {array.dtype for array in weights.values()} == {np.dtype(np.float32)}
    assert not any(array.flags.writeable for array in weights.values())


def test_weights_at_odd_addresses_are_copied_once_at_loading(tmp_path):
    values = np.arange(6, dtype="<f4")
    prefix = write(tmp_path, {"model/w": entry(offset=1)}, b"\7" + values.tobytes())
    assert not load_variables(prefix)["model/w"].flags.aligned
    w = load_weights(tmp_path)["w"]
    assert w.flags.aligned and not w.flags.writeable
    assert np.array_equal(w.ravel(), values)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("offset", [0, 1, 2, 3])
def test_widened_arrays_are_float32_aligned_and_read_only(dtype, offset):
    stored = np.array([[1.5, -2, 0.25], [np.inf, -0.0, 3]], np.float32)  # all three types hold these exactly
    bits = (stored.view(np.uint32) >> 16).astype(np.uint16) if dtype == "bfloat16" else stored.astype(dtype)
    buffer = np.zeros(64, np.uint8)
    buffer[offset : offset + bits.nbytes] = np.frombuffer(bits.tobytes(), np.uint8)
    array = buffer[offset : offset + bits.nbytes].view(bits.dtype).reshape(2, 3)
    wide = widen(array, dtype)
    assert wide.dtype == np.float32 and wide.flags.aligned and not wide.flags.writeable
    assert wide.tobytes() == stored.tobytes()
    assert array.flags.writeable  # the argument stays as it was
    assert np.shares_memory(wide, buffer) == (dtype == "float32" and offset == 0)


def test_a_mapped_file_is_its_bytes_and_an_empty_one_is_an_empty_array(tmp_path):
    (tmp_path / "file").write_bytes(b"bytes")
    (tmp_path / "empty").touch()
    content = map_file(tmp_path / "file")
    assert type(content) is np.ndarray and content.dtype == np.uint8 and not content.flags.writeable
    assert content.tobytes() == b"bytes"
    assert map_file(tmp_path / "empty").shape == (0,)


def test_a_data_file_may_be_empty(tmp_path):
    prefix = write(tmp_path, {"model/w": entry((0, 3), size=0)}, data=b"")
    assert load_weights(tmp_path)["w"].shape == (0, 3)
    assert load_variables(prefix)["model/w"].shape == (0, 3)


def test_a_table_may_have_several_blocks(tmp_path):
    first = [(b"", HEADER), (b"model/a", entry((2,), size=8))]
    write(tmp_path, table(first, [(b"model/b", entry((4,), offset=8, size=16))]), np.arange(6, dtype="<f4").tobytes())
    weights = load_weights(tmp_path)
    assert np.array_equal(weights["a"], [0, 1]) and np.array_equal(weights["b"], [2, 3, 4, 5])


def test_progress_counts_every_byte():
    counted, index = [], GOLDEN / "two_shards" / "model.ckpt.index"
    check_crc(index, data_files(index.parent), counted.append)
    assert sum(counted) == sum(shard_sizes(read_index(index)).values())


# Which checkpoint a directory holds.


@pytest.mark.parametrize(
    "path",
    ["model-1000", "/not/here/any/more/model-1000", "not/here/model-1000", "C:\\\\run1\\\\model-1000", "./model-1000"],
)
def test_the_prefix_is_found_in_the_directory(copy, path):
    folder = copy("adam")
    (folder / "checkpoint").write_text(f'model_checkpoint_path: "{path}"\nall_model_checkpoint_paths: "model-500"\n')
    assert find_prefix(folder) == folder / "model-1000"


def test_an_absolute_path_that_exists_is_followed(copy, tmp_path):
    elsewhere = copy("adam") / "model-1000"
    (tmp_path / "checkpoint").write_text(f'model_checkpoint_path: "{elsewhere.as_posix()}"\n')
    assert find_prefix(tmp_path) == elsewhere


def test_a_prefix_beyond_ascii_is_found_raw_and_escaped(copy):
    folder = copy("one_shard")
    for suffix in ("index", DATA):
        (folder / f"model.ckpt.{suffix}").rename(folder / f"modèle.{suffix}")
    for written in ("modèle".encode(), b"mod\\303\\250le"):
        (folder / "checkpoint").write_bytes(b'model_checkpoint_path: "' + written + b'"\n')
        assert find_prefix(folder) == folder / "modèle"


@pytest.mark.parametrize(
    "path", ["../adam/model-1000", "..", "a/../../adam/model-1000", "..\\\\model-1000", "a/", "", "\\377"]
)
def test_a_prefix_that_leaves_the_directory_or_is_none_is_refused(copy, path):
    folder = copy("adam")
    (folder / "checkpoint").write_text(f'model_checkpoint_path: "{path}"\n')
    refused(folder, "doesn't name a checkpoint")


@pytest.mark.parametrize(
    "content", [b"", b"<html>", b'model_checkpoint_path: "mod', b"\xff\xfe\0", b"\0" * 1000, b"\n" * 200_000]
)
def test_a_checkpoint_file_of_another_kind_is_refused(copy, content):
    folder = copy("adam")
    (folder / "checkpoint").write_bytes(content)
    refused(folder, "doesn't name a checkpoint")


def test_a_huge_checkpoint_file_is_refused(copy):
    folder = copy("adam")
    with (folder / "checkpoint").open("wb") as file:
        file.truncate(1 << 30)
    refused(folder, "larger than")


def test_missing_files_are_named(copy):
    folder = copy("one_shard")
    data = folder / f"model.ckpt.{DATA}"
    data.unlink()
    assert "'model/" in refused(folder, f"{DATA}, which holds variable .* is missing", FileNotFoundError)
    data.mkdir()
    refused(folder, f"{DATA}, which holds variable .* is missing", FileNotFoundError)
    (folder / "model.ckpt.index").unlink()
    refused(folder, "names 'model.ckpt', but there is no 'model.ckpt.index'", FileNotFoundError)
    (folder / "checkpoint").unlink()
    refused(folder, "checkpoint is missing", FileNotFoundError)


def test_a_missing_shard_is_named(copy):
    folder = copy("two_shards")
    (folder / "model.ckpt.data-00001-of-00002").unlink()
    refused(folder, "data-00001-of-00002, which holds variable", FileNotFoundError)


# Damage: cut anywhere, flipped anywhere.


@pytest.mark.parametrize("name", ["two_shards", "dtypes"])
def test_an_index_cut_short_anywhere_is_refused(copy, name):
    folder = copy(name)
    index = index_of(find_prefix(folder))
    content = index.read_bytes()
    for n_bytes in range(len(content)):
        index.write_bytes(content[:n_bytes])
        refused(folder, index.name)


@pytest.mark.parametrize("flip", [0x01, 0x80, 0xFF])
def test_an_index_with_any_byte_changed_is_refused(copy, flip):
    folder = copy("two_shards")
    index = folder / "model.ckpt.index"
    content = index.read_bytes()
    for at in range(len(content)):
        index.write_bytes(content[:at] + bytes([content[at] ^ flip]) + content[at + 1 :])
        refused(folder, index.name)


@pytest.mark.parametrize("name", ["two_shards", "dtypes"])
def test_a_data_file_of_another_length_is_refused(copy, name):
    folder = copy(name)
    for data in folder.glob("*.data-*"):
        content = data.read_bytes()
        for other in [*(content[:n] for n in range(0, len(content), 5)), content[:-1], content + b"\0"]:
            data.write_bytes(other)
            refused(folder, f"{data.name} has {len(other)} bytes, but its last variable '.+' ends at {len(content)}")
        data.write_bytes(content)


def test_a_changed_byte_of_data_is_found_by_its_check_sum(copy):
    folder = copy("dtypes")
    index, data = folder / "model.ckpt.index", folder / f"model.ckpt.{DATA}"
    content = data.read_bytes()
    for at in range(len(content)):
        data.write_bytes(content[:at] + bytes([content[at] ^ 1 << at % 8]) + content[at + 1 :])
        (name,) = [n for n, e in read_index(index).items() if e.offset <= at < e.offset + e.size]
        with pytest.raises(DamagedFile, match=f"{DATA}: variable '{name}' doesn't match its check sum"):
            check_crc(index, [data])


# Malice: right check sums over wrong contents.


@pytest.mark.parametrize(
    "value, match",
    [
        (entry(offset=1), "ends at 25"),
        (entry(offset=2**62), "ends at"),
        (entry(offset=-24), "ends at"),
        (entry(offset=2**63 - 24), "ends at"),
        (entry((2**40,), size=2**42), "ends at"),
        (entry(size=20), "20 bytes aren't float32 of shape"),
        (entry(size=-24), "aren't float32"),
        (entry((2, 4)), "24 bytes aren't float32 of shape"),
        (entry((-2, -3)), "impossible"),
        (entry((0, -1), size=0), "impossible"),
        (entry((0, 2**40, 2**40), size=0), "impossible"),
        (entry((2**32, 2**32, 6)), "impossible"),
        (entry((6,) + (1,) * 40), "impossible"),
        (entry((1,) * 50_000), "impossible"),
        (entry(dtype=3), "is int32, where weights are float32"),
        (entry((3,), dtype=2), "is float64, where weights are float32"),
        (entry(dtype=7), "type 7, which isn't supported"),
        (entry(dtype=0), "type 0, which isn't supported"),
        (entry(dtype=101), "type 101, which isn't supported"),
        (entry(shard=1), "no shard 1 of 1"),
        (entry(shard=-1), "no shard .* of 1"),
        (entry(more=field(0x3A, field(0x0A, b""))), "stored in slices"),
        (entry(more=b"\x28" + b"\xff" * 9 + b"\x02"), "cut short, too large or too long"),
        (entry(more=b"\x28" + b"\xff" * 100_000), "cut short, too large or too long"),
        (entry(more=b"\x28"), "cut short, too large or too long"),
        (entry(more=b"\x35\0\0\0"), "cut short"),
        (entry(more=b"\x12\x7f\0"), "cut short"),
        (entry(more=b"\x12" + varint(2**64 - 1)), "cut short"),
        (entry(more=b"\x2b"), "unknown kind"),
        (b"", "type 0"),
    ],
)
def test_an_impossible_variable_is_refused_by_name(tmp_path, value, match):
    write(tmp_path, {"model/w": value})
    assert "'model/w'" in refused(tmp_path, match)


def test_unknown_fields_are_skipped(tmp_path):
    write(tmp_path, {"model/w": entry(more=field(0x78, 5) + field(0x7A, b"new") + b"\x79" + bytes(8))})
    assert load_weights(tmp_path)["w"].shape == (2, 3)


def test_overlapping_variables_are_refused(tmp_path):
    write(tmp_path, {"model/a": entry(), "model/b": entry((2,), offset=20, size=8)}, bytes(28))
    assert "'model/b'" in refused(tmp_path, "overlaps")


def test_empty_variables_may_lie_anywhere(tmp_path):
    write(tmp_path, {"model/a": entry(), "model/b": entry((0,), offset=20, size=0)})
    assert load_weights(tmp_path)["b"].shape == (0,)


@pytest.mark.parametrize("pairs", [[b"model/b", b"model/a"], [b"model/a", b"model/a"]], ids=["descending", "duplicate"])
@pytest.mark.parametrize("n_blocks", [1, 2])
def test_names_out_of_order_are_refused(tmp_path, pairs, n_blocks):
    pairs = [(key, entry()) for key in pairs]
    blocks = [[(b"", HEADER), *pairs]] if n_blocks == 1 else [[(b"", HEADER), pairs[0]], pairs[1:]]
    write(tmp_path, table(*blocks))
    assert "'model/a'" in refused(tmp_path, "out of order")


def test_a_name_that_isnt_utf8_is_refused(tmp_path):
    write(tmp_path, table([(b"", HEADER), (b"model/\xff\n", entry())]))
    refused(tmp_path, "utf-8")


@pytest.mark.parametrize(
    "header, match",
    [
        (HEADER + field(0x10, 1), "big-endian"),
        (field(0x08, 1) + field(0x1A, field(0x10, 2)), "newer"),
        (b"", "no shard 0 of 0"),
        (b"\x08", "cut short"),
    ],
)
def test_a_header_that_isnt_supported_is_refused(tmp_path, header, match):
    write(tmp_path, table([(b"", header), (b"model/w", entry())]))
    refused(tmp_path, match)


@pytest.mark.parametrize(
    "index, match",
    [
        (b"", "magic"),
        (bytes(48), "magic"),
        (bytes.fromhex("57fb808b247547db"), "block"),
        (bytes(40) + bytes.fromhex("57fb808b247547db"), "check sum"),
        ((b"\0\0\0" + varint(2**62)).ljust(40, b"\0") + bytes.fromhex("57fb808b247547db"), "outside the file"),
        (b"\xff" * 40 + bytes.fromhex("57fb808b247547db"), "cut short, too large or too long"),
        (table(), "header is missing"),
        (table([(b"model/w", entry())]), "header is missing"),
        (table([(b"", HEADER)]), "no variable under 'model/'"),
        (table([(b"", HEADER)], compression=b"\1"), "compressed blocks aren't supported"),
        (table([(b"", HEADER)], restarts=b""), "doesn't end where it should"),
        (table([(b"", HEADER)], restarts=b"\xff\xff\xff\xff"), "doesn't end where it should"),
        (table([(b"", HEADER)], padding=b"\1"), "stray bytes"),
        (table([(b"", HEADER)], gaps=(b"gap", b"")), "don't follow each other"),
        (table([(b"", HEADER)], gaps=(b"", b"gap")), "stray bytes"),
        (b"x" + table([(b"", HEADER)]), "block"),
        (table(b"\1\1\0k"), "doesn't fit"),
        (table(b"\0\1\5k"), "doesn't fit"),
        (table(b"\0\1" + b"\xff" * 9 + b"\1"), "doesn't fit"),
        (table(b"\0\1" + b"\xff" * 11), "cut short, too large or too long"),
        (table(b"\0"), "doesn't fit"),
        (table([(b"", HEADER), (b"n" * 2000, entry())]), "doesn't fit"),
        (table(*[[(b"%05d" % i, b"")] for i in range(1000)]), "more than 256 blocks"),
        (bytes(1 << 20), "larger than"),
    ],
)
def test_a_table_of_another_form_is_refused(tmp_path, index, match):
    write(tmp_path, index)
    refused(tmp_path, match)


def test_slices_are_refused_by_the_variables_name():
    line = refused(GOLDEN / "sliced", "stored in slices")
    assert "model/wte" in line


def test_a_variable_of_strings_is_refused_only_where_it_is_needed():
    prefix = GOLDEN / "strings" / "model.ckpt"
    assert list(load_weights(GOLDEN / "strings")) == ["wte"]
    for read in (lambda: load_variables(prefix), lambda: check_crc(index_of(prefix), data_files(prefix.parent))):
        with pytest.raises(DamagedFile, match="variable 'words' is of TensorFlow's type 7"):
            read()


def test_an_index_that_unfolds_to_much_memory_is_refused_early(tmp_path):
    first = b"\0" + varint(1000) + b"\2" + b"a" * 1000 + b"\x08\1"
    others = [varint(999) + b"\1\2" + bytes([i % 256]) + b"\x08\1" for i in range(30_000)]  # 1 kB more in 7 bytes
    write(tmp_path, table(pairs_to_block([(b"", HEADER)]) + first + b"".join(others)))
    tracemalloc.start()
    refused(tmp_path, "out of order")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100e6


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=60), st.booleans())
def test_any_message_gives_a_variable_or_a_damaged_file(tmp_path_factory, message, appended):
    folder = tmp_path_factory.getbasetemp()
    write(folder, {"model/w": entry() + message if appended else message})
    try:
        for array in load_weights(folder).values():
            array.tobytes()
    except OSError as error:
        assert isinstance(error, DamagedFile | FileNotFoundError)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=60), st.binary(max_size=12))
def test_any_block_gives_variables_or_a_damaged_file(tmp_path_factory, block, restarts):
    folder = tmp_path_factory.getbasetemp()
    write(folder, table(pairs_to_block([(b"", HEADER)]) + block, restarts=restarts))
    refused(folder, "model.ckpt.index")
