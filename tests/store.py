"""A file store on loopback, in place of OpenAI's, that can be told to misbehave."""

import contextlib
import hashlib
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


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
        first, etag = 0, etag or etag_of(body)
        if wanted := self.headers.get("Range"):
            first = int(wanted.removeprefix("bytes=").removesuffix("-"))
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
    n_bytes = len(body) - int(handler.headers["Range"].removeprefix("bytes=").removesuffix("-"))
    handler.head(206, n_bytes, ETag=etag_of(body), Content_Range=f"bytes 0-{n_bytes - 1}/{len(body)}")
    handler.send(body[:n_bytes])


def ignores_range(handler, body):
    del handler.headers["Range"]
    handler.serve(body)


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
