"""Downloads from servers that draw a fault for any reply, and kills the process that downloads, at random.

Usage: python tests/compare_servers.py [n_servers] [first seed]   (1,000 servers, the default, take 10 to 20 minutes)

A run ends with all files, with one line (an OSError), or killed. Whatever happens, a file that has its name is right.
After its runs a server becomes honest, and what is held by then must not keep the files from coming. Prints how many
runs ended how; raises AssertionError at the first that ends otherwise, with the seed of its server.
"""

import multiprocessing
import os
import random
import re
import sys
import tempfile
import threading
import time
from collections import Counter
from functools import partial
from hashlib import sha256
from pathlib import Path

from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import store
from store import serving

from model_files.download import DATA, FILES, download

MOST_SECONDS, MOST_REQUESTS = 60, 1000  # for one run; what takes more has no end
ENDS = ("can't reach", r"the server answers \d+", "a web page", "how long", "packs the file", "timed out", "sends")
ENDS += (
    "IncompleteRead",
    "redirects",
    "bytes came",
    "thrown away",
    "refused",
    "reset",
    "closed",
    "no http",
    "asks for",
)


def garbage(handler, body):
    """The right head and the wrong bytes."""
    handler.head(200, len(body), ETag=store.etag_of(body))
    handler.send(bytes(len(body)))


def garbage_for_the_rest(handler, body):
    first = store.first_wanted(handler)
    place = f"bytes {first}-{len(body) - 1}/{len(body)}"
    handler.head(206, len(body) - first, ETag=store.etag_of(body), Content_Range=place)
    handler.send(bytes(len(body) - first))


def says_no_http(handler, body):
    handler.wfile.write(b"\0\1\2 no http\r\n\r\n")
    handler.close_connection = True


def chunked(handler, body):
    handler.head(200, None, Transfer_Encoding="chunked", Connection="close")
    handler.wfile.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body))
    handler.close_connection = True


def hangs_up(handler, body):
    handler.close_connection = True


def hangs(handler, body, n_bytes):
    handler.head(200, len(body), ETag=store.etag_of(body))
    handler.wfile.write(body[:n_bytes])
    time.sleep(1)
    handler.close_connection = True


def draw_fault(rng, method, body, kinds):
    """A function of (handler, body) that answers one request wrongly, in one of some kinds (numbers of any size)."""
    n_bytes = rng.randrange(len(body))
    faults = [store.status(rng.choice([403, 404, 405, 408, 416, 429, 500, 501, 502, 503])), store.web_page()]
    faults += [store.no_length, store.gzipped, store.redirects(), store.redirects("http://127.0.0.1:1/"), hangs_up]
    faults += [says_no_http, partial(hangs, n_bytes=0), store.other_body(lambda body: body + b"x")]
    faults += [store.tagged(tag) for tag in ("", 'W/"weak"', f'"{rng.randrange(3)}"')]
    if method == "GET":
        faults += 4 * [store.breaks_after(n_bytes)] + [store.at_most(n_bytes + 1), store.shorter_than_it_says(n_bytes)]
        faults += [store.ignores_range, partial(store.ignores_range, n_bytes=n_bytes), store.wrong_place, chunked]
        faults += [store.rest_with_status_200, store.rest_with_status_200_and_its_place, store.web_page("text/plain")]
        faults += [store.other_body(lambda body: body[:n_bytes]), store.other_body(lambda body: body[::-1])]
        faults += [garbage, garbage_for_the_rest, partial(hangs, n_bytes=n_bytes)]
    return faults[rng.choice(kinds) % len(faults)]


class Faults(list):
    """The faults of a file at a server, without end: each request has one with a chance of `share`."""

    def __init__(self, rng, method, share, kinds):
        self.rng, self.method, self.share, self.kinds = rng, method, share, kinds

    def __bool__(self):
        return self.rng.random() < self.share

    def pop(self, at):
        return lambda handler, body: draw_fault(self.rng, self.method, body, self.kinds)(handler, body)


def run(url, models_dir, sums, end):
    """Downloads in a process of its own, and writes to the file `end` how it ended."""
    os.environ |= {"GPT2_BASE_URL": url, "NO_PROXY": "127.0.0.1"}
    sys.stderr = open(os.devnull, "w")
    tqdm.set_lock(threading.RLock())  # one between processes would outlive those that are killed
    try:
        download("355M", models_dir, sums, (0.001, 0.002, 0.004), (5, 0.4))
        line = "came"
    except OSError as error:
        line = str(error)
    except BaseException as error:
        line = f"{type(error).__name__}\n{error}"  # two lines: whoever reads it knows that it's wrong
    end.write_text(line)


def run_once(context, url, folder, sums, kill_after):
    """How a run ended: "came", a line, or "killed"."""
    end = folder / "end"
    end.unlink(missing_ok=True)
    process = context.Process(target=run, args=(url, folder, sums, end))
    process.start()
    process.join(MOST_SECONDS if kill_after is None else kill_after)
    if alive := process.is_alive():
        process.kill()
        process.join()
    assert not alive or kill_after is not None, "it never ends"
    return end.read_text() if end.exists() and not alive else "killed"


def check_files(folder, files):
    """AssertionError if a file that has its name isn't right."""
    for name, body in files.items():
        path = folder / "355M" / name
        assert not path.exists() or path.read_bytes() == body, f"{name} is wrong"


def compare(context, seed, files, folder):
    """How the runs with one server ended, and the most requests that a run made."""
    rng, ends, most = random.Random(seed), [], 0
    sums = {name: sha256(body).hexdigest() for name, body in files.items() if name != DATA}  # that has its index
    with serving(files) as server:
        share, kinds = rng.choice([0.1, 0.3, 0.6, 0.9]), [rng.randrange(1000) for _ in range(rng.randrange(1, 9))]
        server.rate = rng.choice([None, 500_000])
        for name in FILES:
            server.faults["HEAD", name] = Faults(random.Random(rng.random()), "HEAD", share / 20, kinds)
            server.faults["GET", name] = Faults(random.Random(rng.random()), "GET", share, kinds)
        while len(ends) < 6 and "came" not in ends:
            server.asked.clear()
            kill_after = rng.choice([None, rng.random() / 2])
            ends.append(run_once(context, server.url, folder, sums, kill_after))
            check_files(folder, files)
            most = max(most, len(server.asked))
        server.faults, server.rate = {}, None
        for _ in FILES:  # what came damaged is thrown away first, one file a run
            ends.append(run_once(context, server.url, folder, sums, None))
            check_files(folder, files)
            if ends[-1] == "came":
                break
    assert ends[-1] == "came", f"an honest server gives {ends[-1]!r}"
    return ends, most


def kind(end):
    """A line without its names and numbers."""
    return next((pattern for pattern in ENDS if re.search(pattern, end)), end)


def compare_all(seeds, n_graph=60_000, n_vocab=20_000):
    """(how often the runs ended in each way, the most requests that a run made)."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["requests", "tqdm", "model_files.checkpoint", "model_files.download", "store"])
    files, counts, most = store.gpt2_files(n_graph, n_vocab), Counter(), 0
    for seed in seeds:
        with tempfile.TemporaryDirectory() as folder:
            try:
                ends, n_requests = compare(context, seed, files, Path(folder))
                assert all("\n" not in end for end in ends), ends
                assert n_requests < MOST_REQUESTS, f"{n_requests} requests in a run"
            except AssertionError as error:
                raise AssertionError(f"server {seed}: {error}") from None
        counts.update(map(kind, ends))
        most = max(most, n_requests)
    return counts, most


if __name__ == "__main__":
    n_servers, seed = map(int, sys.argv[1:] + ["1000", "0"][len(sys.argv) - 1 :])
    start = time.monotonic()
    counts, most = compare_all(range(seed, seed + n_servers))
    print(f"{n_servers} servers, {sum(counts.values())} runs, at most {most} requests in one, no wrong file")
    print("\n".join(f"{n:6} {end}" for end, n in counts.most_common()))
    print(f"{time.monotonic() - start:.0f} s")
