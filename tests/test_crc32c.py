import numpy as np
import pytest

from model_files.crc32c import crc32c, masked

READ_COMMAND = bytes.fromhex(
    "01c00000 00000000 00000000 00000000 14000000 0000040000000014 00000018 28000000 00000000 02000000 00000000"
)
PUBLISHED = [  # RFC 3720, B.4, and the usual check value
    (bytes(32), 0x8A9136AA),
    (b"\xff" * 32, 0x62A8AB43),
    (bytes(range(32)), 0x46DD794E),
    (bytes(reversed(range(32))), 0x113FDB5C),
    (READ_COMMAND, 0xD9963A56),
    (b"123456789", 0xE3069283),
    (b"", 0),
]


def bit_by_bit(data):
    """The definition: divide by the polynomial, one bit at a time."""
    register = 0xFFFFFFFF
    for byte in data:
        register ^= byte
        for _ in range(8):
            register = register >> 1 ^ (0x82F63B78 if register & 1 else 0)
    return register ^ 0xFFFFFFFF


@pytest.mark.parametrize("data, crc", PUBLISHED)
def test_published_vectors(data, crc):
    assert crc32c(data) == crc == bit_by_bit(data)


def test_a_masked_crc_is_leveldbs():
    # LevelDB's crc32c_test.cc: masking changes the value, twice masked is not once masked, and the way back exists
    crc = crc32c(b"foo")
    assert crc not in (masked(crc), masked(masked(crc))) and masked(crc) != masked(masked(crc))
    rotated = (masked(crc) - 0xA282EAD8) & 0xFFFFFFFF
    assert (rotated >> 17 | rotated << 15) & 0xFFFFFFFF == crc


def test_every_short_length_equals_the_definition():
    data = np.random.default_rng(0).bytes(80)
    assert [crc32c(data[:n]) for n in range(81)] == [bit_by_bit(data[:n]) for n in range(81)]


@pytest.mark.parametrize("n_bytes", [16384 * 4 - 1, 16384 * 4, 16384 * 4 + 5, 3 * 16384 * 4 + 4])
def test_lengths_around_a_round_of_lanes_equal_the_definition(n_bytes):
    data = np.random.default_rng(n_bytes).bytes(n_bytes)
    assert crc32c(data) == bit_by_bit(data)


def test_a_crc_continues_from_the_bytes_before():
    data = np.random.default_rng(1).bytes(200_000)
    for cut in (0, 1, 2, 3, 4, 5, 65536, 65537, 199_999, 200_000):
        assert crc32c(data[cut:], crc32c(data[:cut])) == crc32c(data)


def test_any_contiguous_buffer_will_do():
    data = bytes(range(100))
    for buffer in (bytearray(data), memoryview(b"x" + data)[1:], np.frombuffer(data, np.uint8).view(np.float32)):
        assert crc32c(buffer) == crc32c(data)


def test_the_buffer_stays_as_it_was():
    data = np.arange(1000, dtype=np.float32)
    crc32c(data, 123)
    assert np.array_equal(data, np.arange(1000))
