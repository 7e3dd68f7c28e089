"""LevelDB's table, a sorted list of (key, value) pairs of bytes, as TensorFlow writes it for a checkpoint's index.

Format: LevelDB's doc/table_format.md. Nothing is trusted: ValueError says what isn't as it should be.
"""

from itertools import pairwise

from model_files.crc32c import crc32c, masked

MAGIC = bytes.fromhex("57fb808b247547db")
MAX_BLOCKS, MAX_KEY_BYTES = 256, 1024  # far more than a GPT-2 needs, so that a hostile table of 256 kB costs little


def read_table(table):
    """The (key, value) pairs in the bytes of a table, keys strictly ascending.

    Its parts follow each other without a gap: data blocks; a block that isn't used here; a block that lists the data
    blocks; and a footer of 48 bytes that says where the last two blocks are.
    """
    footer = table[-48:]
    if footer[-8:] != MAGIC:
        raise ValueError("no magic number at its end: it isn't a checkpoint's index, or is cut short")
    *unused, at = varints(footer[:40], 0, 2)
    *listing, at = varints(footer[:40], at, 2)
    places = [varints(value, 0, 2)[:2] for _, value in _block(table, *listing)]
    if len(places) > MAX_BLOCKS:
        raise ValueError(f"it has more than {MAX_BLOCKS} blocks, which no GPT-2's has")
    end = 0
    for offset, size in [*places, unused, listing]:
        if offset != end:
            raise ValueError("its blocks don't follow each other")
        end = offset + size + 5
    if end != len(table) - 48 or any(footer[at:40]) or _block(table, *unused):
        raise ValueError("it has stray bytes near its end")
    pairs = [pair for place in places for pair in _block(table, *place)]
    for (key, _), (next_key, _) in pairwise(pairs):
        if key >= next_key:
            raise ValueError(f"name {next_key.decode(errors='replace')!r} is there twice or out of order")
    return pairs


def _block(table, offset, size):
    """The (key, value) pairs of one block: `size` bytes, a byte for the compression, the masked CRC of both."""
    end = offset + size + 1
    if end + 4 > len(table):
        raise ValueError("a block lies outside the file")
    if masked(crc32c(table[offset:end])) != int.from_bytes(table[end : end + 4], "little"):
        raise ValueError("a block doesn't match its check sum: the file is damaged")
    if table[end - 1] != 0:
        raise ValueError("compressed blocks aren't supported")
    block = table[offset : end - 1]
    # The block ends with offsets to start a search from, four bytes each, and their number.
    end = size - 4 - 4 * int.from_bytes(block[-4:], "little")
    pairs, key, at = [], b"", 0
    while at < end:
        n_shared, n_own, n_value, at = varints(block, at, 3)
        if n_shared > len(key) or n_shared + n_own > MAX_KEY_BYTES or at + n_own + n_value > end:
            raise ValueError(f"what follows the name {key.decode(errors='replace')!r} doesn't fit its block")
        key = key[:n_shared] + block[at : at + n_own]  # the first bytes are those of the key before
        at += n_own + n_value
        pairs.append((key, block[at - n_value : at]))
    if at != end:
        raise ValueError("a block doesn't end where it should")
    return pairs


def varints(data, at, n):
    """The n numbers that start at data[at], then where they end. Each is below 2**64, seven bits a byte, lowest first.

    b"\\x07" is 7 and b"\\x87\\x01" is 128 + 7. A number in more bytes than it needs is refused: it is damaged.
    """
    numbers = []
    for _ in range(n):
        number = 0
        for i, byte in enumerate(data[at : at + 10]):
            number |= (byte & 127) << 7 * i
            if byte < 128 and number < 2**64 and (byte > 0 or i == 0):
                break
        else:
            raise ValueError("a number is cut short, too large or too long")
        numbers.append(number)
        at += i + 1
    return *numbers, at
