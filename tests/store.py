"""A file store on loopback, in place of OpenAI's, that can be told to misbehave."""

import contextlib
import gzip
import hashlib
import random
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from model_files.download import DATA, GRAPH, INDEX

CHECKPOINT = Path(__file__).parent / "golden" / "checkpoints" / "one_shard"


def gpt2_files(n_graph=400_000, n_vocab=30_000):
    """Files of a store: a real, tiny checkpoint, and stand-ins for the rest; the graph is the largest."""
    noise = random.Random(0).randbytes
    return {
        "checkpoint": b'model_checkpoint_path: "model.ckpt"\nall_model_checkpoint_paths: "model.ckpt"\n',
        "encoder.json": b'{"a": 0}',
        "hparams.json": b'{"n_vocab": 50257, "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12}',
        "vocab.bpe": b"#version: 0.2\n" + noise(n_vocab),
        INDEX: (CHECKPOINT / INDEX).read_bytes(),
        GRAPH: b"\n" + noise(n_graph),
        DATA: (CHECKPOINT / DATA).read_bytes(),
    }


class Store(ThreadingHTTPServer):
    """Serves files (name -> bytes) at url/<size>/<name>, with ETag and Range.

    faults[method, name] is a list of functions of (handler, body); each answers one request in place of the store.
    asked lists (method, name, Range or None); sent counts the bytes of bodies; rate limits them, in bytes a second.
    """

    daemon_threads = True

    def __init__(self, files):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files, self.faults, self.asked, self.sent, self.rate = dict(files), {}, [], 0, None
        self.url = f"http://127.0.0.1:{self.server_port}/models"

    def handle_error(self, request, client_address):
        pass  # clients that vanish are what is tested here

    def gets(self):
        """(name, Range) of the files asked for."""
        return [(name, wanted) for method, name, wanted in self.asked if method == "GET"]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_GET(self):
        name, store = self.path.rpartition("/")[2], self.server
        store.asked.append((self.command, name, self.headers.get("Range")))
        faults, body = store.faults.get((self.command, name)), store.files.get(name)
        if faults:
            faults.pop(0)(self, body)
        elif body is None:
            self.head(404, 0)
        else:
            self.serve(body)

    do_HEAD = do_GET

    def log_message(self, *args):
        pass

    def head(self, status, length, **fields):
        self.send_response(status)
        if length is not None:
            self.send_header("Content-Length", length)
        for name, value in fields.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()

    def serve(self, body, n_bytes=None, etag=None, content_range=None):
        """The right answer, or one of which only the first n_bytes come, with a wrong tag or place."""
        first, etag = first_wanted(self), etag or etag_of(body)
        if "Range" in self.headers:
            if first >= len(body):
                return self.head(416, 0, ETag=etag, Content_Range=f"bytes */{len(body)}")
            place = content_range or f"bytes {first}-{len(body) - 1}/{len(body)}"
            self.head(206, len(body) - first, ETag=etag, Content_Range=place)
        else:
            self.head(200, len(body), ETag=etag)
        if self.command == "GET":
            self.send(body[first:], n_bytes)

    def send(self, body, n_bytes=None):
        for i in range(0, len(body), 4096):
            piece = body[:n_bytes][i : i + 4096]
            self.wfile.write(piece)
            self.server.sent += len(piece)
            if self.server.rate:
                time.sleep(len(piece) / self.server.rate)
        if n_bytes is not None:
            self.close_connection = True


def etag_of(body):
    return f'"{hashlib.md5(body).hexdigest()}"'


def first_wanted(handler):
    """Where the bytes begin that were asked for."""
    return int(handler.headers.get("Range", "bytes=0-").removeprefix("bytes=").removesuffix("-"))


# The faults. Each is a function of (handler, body), or returns one.


def breaks_after(n_bytes):
    return lambda handler, body: handler.serve(body, n_bytes)


def status(code):
    return lambda handler, body: handler.head(code, 0)


def web_page(content_type="text/html; charset=utf-8"):
    """A page with status 200 and as long as the file would be."""

    def answer(handler, body):
        handler.head(200, len(body), Content_Type=content_type, ETag='"page"')
        if handler.command == "GET":
            handler.send(b"<!DOCTYPE html><title>Log in</title>".ljust(len(body))[: len(body)])

    return answer


def wrong_place(handler, body):
    """206 and as many bytes as asked for, but from the beginning."""
    n_bytes = len(body) - first_wanted(handler)
    handler.head(206, n_bytes, ETag=etag_of(body), Content_Range=f"bytes 0-{n_bytes - 1}/{len(body)}")
    handler.send(body[:n_bytes])


def too_long(n_more, place_too=False):
    """206 and n_more bytes than there are from the right place on; place_too: as its Content-Range says."""

    def answer(handler, body):
        first = first_wanted(handler)
        last = len(body) - 1 + (n_more if place_too else 0)
        place = f"bytes {first}-{last}/{len(body)}"
        handler.head(206, len(body) - first + n_more, ETag=etag_of(body), Content_Range=place)
        handler.send(body[first:] + bytes(n_more))

    return answer


def ignores_range(handler, body, n_bytes=None):
    del handler.headers["Range"]
    handler.serve(body, n_bytes)


def rest_with_status_200(handler, body, **fields):
    first = first_wanted(handler)
    handler.head(200, len(body) - first, ETag=etag_of(body), **fields)
    if handler.command == "GET":
        handler.send(body[first:])


def rest_with_status_200_and_its_place(handler, body):
    place = f"bytes {first_wanted(handler)}-{len(body) - 1}/{len(body)}"
    rest_with_status_200(handler, body, Content_Range=place)


def at_most(n_bytes):
    """Answers every request with so few bytes, and says so, as HTTP allows for a range."""

    def answer(handler, body):
        first = first_wanted(handler)
        piece = body[first : first + n_bytes]
        place = f"bytes {first}-{first + len(piece) - 1}/{len(body)}"
        handler.head(206, len(piece), ETag=etag_of(body), Content_Range=place)
        handler.send(piece)

    return answer


def shorter_than_it_says(n_bytes):
    """The store's record says one length, and its file has n_bytes; after these, 416."""

    def answer(handler, body):
        if first_wanted(handler) >= n_bytes:
            return handler.head(416, 0, ETag=etag_of(body), Content_Range=f"bytes */{n_bytes}")
        handler.serve(body, n_bytes - first_wanted(handler))

    return answer


def other_body(change):
    """Another version of the file, change(body), with its own tag."""
    return lambda handler, body: handler.serve(change(body))


def tagged(etag):
    """The right bytes under another tag, or under none at all: ""."""

    def answer(handler, body):
        if etag:
            return handler.serve(body, etag=etag)
        first = first_wanted(handler)
        place = {"Content_Range": f"bytes {first}-{len(body) - 1}/{len(body)}"} if first else {}
        handler.head(206 if first else 200, len(body) - first, **place)
        if handler.command == "GET":
            handler.send(body[first:])

    return answer


def gzipped(handler, body):
    packed = gzip.compress(body)
    handler.head(200, len(packed), ETag=etag_of(body), Content_Encoding="gzip")
    if handler.command == "GET":
        handler.send(packed)


def redirects(place=None):
    """To an address, or to the same file under another one."""

    def answer(handler, body):
        there = place or handler.path.replace("/models/", "/moved/")
        handler.head(302, 0, Location=there)

    return answer


def no_length(handler, body):
    handler.head(200, None, ETag=etag_of(body), Connection="close")
    handler.close_connection = True


def silent(handler, body):
    time.sleep(30)
    handler.close_connection = True


def hangs(handler, body):
    handler.head(200, len(body), ETag=etag_of(body))
    handler.wfile.write(body[:1000])
    silent(handler, body)


@contextlib.contextmanager
def serving(files):
    with Store(files) as store:
        thread = threading.Thread(target=store.serve_forever, args=(0.02,))
        thread.start()
        yield store
        store.shutdown()
        thread.join()
