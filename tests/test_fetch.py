"""One file from servers that misbehave: the right bytes, or one line after the pauses; what is held stays."""

import random
import time

import pytest
import requests
from store import (
    at_most,
    breaks_after,
    etag_of,
    gzipped,
    ignores_range,
    no_length,
    other_body,
    redirects,
    rest_with_status_200,
    rest_with_status_200_and_its_place,
    serving,
    shorter_than_it_says,
    status,
    tagged,
    too_long,
    web_page,
    wrong_place,
)
from tqdm import tqdm

from model_files.fetch import ask_length, fetch, held, resume_point

BODY = random.Random(0).randbytes(100_000)
OTHER = random.Random(1).randbytes(100_000)
N_HELD = 49_152


@pytest.fixture
def store(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with serving({"f": BODY}) as store:
        yield store


@pytest.fixture
def part(tmp_path):
    return tmp_path / "part-f"


@pytest.fixture
def slept(monkeypatch):
    """The pauses so far, none of which is waited for; after 60 the test fails."""
    slept, sleep = [], time.sleep

    def note(seconds):
        if seconds < 1:
            return sleep(seconds)  # the server's
        assert len(slept) < 60, "it goes round and round"
        slept.append(seconds)

    monkeypatch.setattr(time, "sleep", note)
    return slept


def bring(store, part, *faults, pauses=(1, 2, 4, 8), length=None, timeout=(60, 60)):
    """Fetches the file; each fault answers one request. Returns the Ranges that were asked for."""
    store.faults["GET", "f"] = list(faults)
    store.asked.clear()
    with requests.Session() as session, tqdm(disable=True) as bar:
        fetch(session, f"{store.url}/355M/f", part, pauses, timeout, bar, length)
    return [wanted for _, wanted in store.gets()]


def hold(store, part, n_bytes=N_HELD, fault=breaks_after):
    """A part of n_bytes, left by a fetch that broke off."""
    with pytest.raises(OSError):
        bring(store, part, fault(n_bytes), pauses=())
    assert part.read_bytes() == BODY[:n_bytes]


def test_416_for_the_rest_of_a_file_that_is_shorter_than_its_length_ends_after_the_pauses(store, part, slept):
    with pytest.raises(OSError, match=r"IncompleteRead\(65536 bytes") as error:
        bring(store, part, *[shorter_than_it_says(65_536)] * 99)
    assert "\n" not in str(error.value) and str(error.value).endswith("; the same command goes on from here later")
    assert slept == [1, 2, 4, 8]
    assert part.read_bytes() == BODY[:65_536]  # nothing proved it wrong
    assert bring(store, part) == ["bytes=65536-"]  # the store is in order again
    assert part.read_bytes() == BODY


NO_RANGES = [
    status(416),
    status(400),
    status(501),
    wrong_place,
    ignores_range,
    too_long(9),
    too_long(9, place_too=True),
]


@pytest.mark.parametrize("fault", NO_RANGES)
def test_what_is_not_the_rest_makes_it_ask_for_the_whole_at_once(store, part, slept, fault):
    hold(store, part)
    assert bring(store, part, fault) == [f"bytes={N_HELD}-", None]
    assert part.read_bytes() == BODY and slept == []


@pytest.mark.parametrize("fault", [status(416), status(503), wrong_place, rest_with_status_200, gzipped, web_page()])
def test_what_is_held_is_kept_while_nothing_proves_it_wrong(store, part, slept, fault):
    hold(store, part)
    with pytest.raises(OSError):
        bring(store, part, *[fault, breaks_after(10_000)] * 99, length=len(BODY))
    assert part.read_bytes() == BODY[:N_HELD] and held(part) == N_HELD
    assert bring(store, part) == [f"bytes={N_HELD}-"]
    assert part.read_bytes() == BODY


def test_the_rest_alone_with_status_200_is_the_rest(store, part):
    hold(store, part)
    assert bring(store, part, rest_with_status_200_and_its_place) == [f"bytes={N_HELD}-"]
    assert part.read_bytes() == BODY


@pytest.mark.parametrize("n_held", [N_HELD, 65_536])
def test_the_rest_alone_with_status_200_and_no_place_is_never_taken_for_the_whole(store, part, n_held):
    hold(store, part, n_held)
    assert bring(store, part, rest_with_status_200, length=len(BODY)) == [f"bytes={n_held}-", None]
    assert part.read_bytes() == BODY


def test_a_server_that_gives_less_than_was_asked_for_is_asked_again(store, part, slept):
    hold(store, part)
    wanted = bring(store, part, *[at_most(16_384)] * 2)
    assert wanted == [f"bytes={n}-" for n in (N_HELD, N_HELD + 16_384, N_HELD + 32_768)]
    assert part.read_bytes() == BODY and slept == [1, 1]


def test_a_piece_that_was_not_asked_for_is_not_taken_for_the_whole(store, part, slept):
    bring(store, part, at_most(20_000))
    assert part.read_bytes() == BODY and slept == [1]


def test_a_length_that_is_not_the_one_it_was_asks_again_and_ends_in_one_line(store, part, slept):
    longer = other_body(lambda body: body + b"x")
    with pytest.raises(OSError, match="sends 100,001 bytes of 100,000.*; the same command"):
        bring(store, part, *[longer] * 99, length=len(BODY))
    assert slept == [1, 2, 4, 8] and not part.exists()
    bring(store, part, longer, length=len(BODY))
    assert part.read_bytes() == BODY


def test_bytes_that_come_only_to_be_thrown_away_do_not_begin_the_pauses_anew(store, part, slept):
    def cut(handler, body):  # each time another version
        ignores_range(handler, random.randbytes(len(body)), 50_000)

    with pytest.raises(OSError, match="; the same command"):
        bring(store, part, *[cut] * 99)
    assert slept == [1, 2, 4, 8]


def test_a_proxy_that_cuts_anywhere_and_ignores_range_ends(store, part, slept):
    def cut(handler, body):
        ignores_range(handler, body, rng.randrange(20_000, 80_000))

    rng = random.Random(1)
    with pytest.raises(OSError, match="; the same command"):
        bring(store, part, *[cut] * 999)
    assert part.read_bytes() == BODY[: part.stat().st_size] and held(part) > 60_000


def test_the_same_bytes_under_another_tag_are_kept(store, part):
    hold(store, part)
    with pytest.raises(OSError):
        bring(store, part, tagged('"new"'), lambda handler, body: handler.serve(body, 65_536, '"new"'), pauses=())
    assert part.read_bytes() == BODY[:65_536]
    assert bring(store, part, tagged('"new"')) == ["bytes=65536-"]
    assert part.read_bytes() == BODY


@pytest.mark.parametrize("n_same", [0, 1, 16_384, 20_000, N_HELD - 1, N_HELD])
def test_another_version_is_written_from_the_first_byte_that_differs(store, part, n_same):
    hold(store, part)
    store.files["f"] = BODY[:n_same] + OTHER[n_same:]
    assert bring(store, part) == [f"bytes={N_HELD}-", None]
    assert part.read_bytes() == store.files["f"]


def test_another_version_may_end_within_what_is_held(store, part):
    hold(store, part)
    store.files["f"] = BODY[:30_000]
    bring(store, part)
    assert part.read_bytes() == BODY[:30_000] and resume_point(part) == (30_000, 30_000, etag_of(BODY[:30_000]))
    assert bring(store, part) == []  # nothing is missing


def test_another_version_that_breaks_off_is_all_that_is_held_then(store, part):
    hold(store, part)
    store.files["f"] = BODY[:10_000] + OTHER[10_000:]
    with pytest.raises(OSError):
        bring(store, part, status(416), breaks_after(16_384), pauses=())
    assert part.read_bytes() == store.files["f"][:16_384]
    assert bring(store, part) == ["bytes=16384-"]
    assert part.read_bytes() == store.files["f"]


def test_without_tags_the_whole_is_compared_with_what_is_held(store, part, slept):
    def cut(handler, body):
        handler.head(200, len(body))
        handler.send(body, N_HELD)

    hold(store, part, fault=lambda n_bytes: cut)
    assert bring(store, part, cut, tagged("")) == [None, None]
    assert part.read_bytes() == BODY and slept == [1]


def test_a_leftover_that_nothing_is_known_of_is_no_harm(store, part):
    part.write_bytes(OTHER * 2)
    assert bring(store, part) == [None]
    assert part.read_bytes() == BODY


def test_a_file_that_comes_packed_is_asked_for_again_and_ends_in_one_line(store, part, slept):
    bring(store, part, gzipped)
    assert part.read_bytes() == BODY and slept == [1]
    part.unlink()
    with pytest.raises(OSError, match=r"the server packs the file \(gzip\).*; the same command"):
        bring(store, part, *[gzipped] * 99)
    assert slept == [1, 1, 2, 4, 8] and not part.exists()


def test_a_redirect_is_followed_with_its_range(store, part):
    hold(store, part)
    assert bring(store, part, redirects()) == [f"bytes={N_HELD}-"] * 2
    assert part.read_bytes() == BODY


@pytest.mark.parametrize("place", ["http://127.0.0.1:1/f", "ftp://a/f", "http://[1/f", "http://a b/"])
def test_a_redirect_to_nowhere_ends_in_one_line(store, part, slept, place):
    with pytest.raises(OSError, match="; the same command") as error:
        bring(store, part, *[redirects(place)] * 99)
    assert "\n" not in str(error.value) and slept == [1, 2, 4, 8]


def test_redirects_in_a_circle_end_in_one_line(store, part, slept):
    with pytest.raises(OSError, match="redirects.; the same command"):
        bring(store, part, *[redirects()] * 999)


CHUNKED = {"Transfer-Encoding": "chunked"}


@pytest.mark.parametrize("fields", [{}, CHUNKED, {"Content-Length": 5} | CHUNKED, {"Content-Length": "9" * 99}])
def test_a_head_without_a_sound_length_ends_in_one_line(store, part, slept, fields):
    with pytest.raises(OSError, match="doesn't say how long.*; the same command") as error:
        bring(store, part, lambda handler, body: handler.head(200, None, Connection="close", **fields))
    assert "\n" not in str(error.value) and not part.exists()


def test_a_servers_words_are_printed_as_one_short_line(store, part, slept):
    def shout(handler, body):
        handler.wfile.write(b"\x1b[31m no http" + b"!" * 9999 + b"\n\n")
        handler.close_connection = True

    def reasons(handler, body):
        handler.wfile.write(b"HTTP/1.1 404 not\x1b[2J here\r\nContent-Length: 0\r\n\r\n")

    for fault in (shout, reasons):
        with pytest.raises(OSError, match="no http!!|404 not .2J here") as error:
            bring(store, part, *[fault] * 99)
        assert str(error.value).isprintable() and len(str(error.value)) < 400


@pytest.mark.parametrize("code", [405, 501])
def test_a_server_without_head_is_asked_with_get(store, code):
    store.faults["HEAD", "f"] = [status(code)] * 2
    with requests.Session() as session:
        assert ask_length(session, f"{store.url}/355M/f", (60, 60)) == len(BODY)
        store.faults["GET", "f"] = [status(code)]
        with pytest.raises(ConnectionError, match=f"355M/f: the server answers {code} "):
            ask_length(session, f"{store.url}/355M/f", (60, 60))


@pytest.mark.parametrize("fault", [status(403), status(404), status(503), web_page(), gzipped, no_length])
def test_a_first_contact_that_brings_no_file_is_a_connection_error_without_the_password(store, fault):
    store.faults["HEAD", "f"] = [fault]
    url = f"{store.url}/355M/f"
    with requests.Session() as session, pytest.raises(ConnectionError, match=f"^{url}: .") as error:
        ask_length(session, url.replace("//", "//me:secret@"), (60, 60))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("proxy", ["socks5://127.0.0.1:1", "ftp://127.0.0.1", "http://[1", "://", "a:b", "http://a b"])
def test_a_proxy_that_cannot_be_used_is_a_connection_error(monkeypatch, proxy):
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, proxy)
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "")
    with requests.Session() as session, pytest.raises(ConnectionError, match="^can't reach gpt2.invalid .") as error:
        ask_length(session, "http://gpt2.invalid/f", (5, 5))
    assert "\n" not in str(error.value)


def test_a_part_that_cannot_be_written_is_said_so(store, tmp_path):
    with pytest.raises(OSError, match=r"can't write .*part-f \(No such file or directory\)"):
        bring(store, tmp_path / "missing" / "part-f")
