"""One file from an HTTP server to the disk, however often the connection, the process or the machine breaks off.

The file grows as a part. Beside it, `<part>.etag` holds the length of the whole and the server's tag for that version
of the file. A new try asks for the rest alone, and takes it if place, length and tag are right. Otherwise it asks for
the whole, compares that with what is held, and writes from the first byte that differs: two versions are never mixed,
and what is held is only thrown away when it is proved wrong. Nothing here knows what is right inside the file; whoever
gives a part its final name checks that first.
"""

import contextlib
import os
import re
import time
from urllib.parse import urlsplit


def ask_length(session, url, timeout):
    """The length in bytes of the file at url; asked once, for it is the first contact.

    Raises ConnectionError if the host can't be reached or has no such file for us, whatever the reason. session is of
    requests; timeout is (seconds to connect, seconds without a byte).
    """
    import requests

    host = urlsplit(url).netloc.rpartition("@")[2]  # what may stand before is a password
    try:
        for method in ("HEAD", "GET"):
            with answer(session, method, url, timeout) as reply:
                if method == "GET" or reply.status_code not in (405, 501):  # those say: HEAD isn't allowed, or unknown
                    return described(reply)[0]
    except requests.ConnectionError as error:
        raise ConnectionError(f"can't reach {host} ({reason(error)})") from None
    except OSError as error:
        raise ConnectionError(f"{without_password(url)}: {reason(error)}") from None


def fetch(session, url, part, pauses, timeout, bar, length=None):
    """Brings the part (a Path) to its full length, and the bar (of tqdm) with it; OSError if that fails.

    length: what the whole file must have, if that is known. After a break it waits and tries again until the pauses
    (seconds) are used up, from the first one again whenever the part is longer than ever before: bytes that come once
    more, since others were thrown away, don't count. What came stays for the next call.
    """
    import requests

    left, longest, n_before = list(pauses), held(part), bar.n - held(part)
    while True:
        try:
            return fetch_once(session, url, part, timeout, bar, length)
        except requests.RequestException as error:
            why = reason(error)
            if isinstance(error, requests.HTTPError) and error.response.status_code < 500:
                left = []  # the same question would get the same answer
        except OSError as error:
            raise OSError(f"can't write {part} ({reason(error)}); the same command goes on from here later") from None
        bar.update(n_before + held(part) - bar.n)
        if held(part) > longest:
            left, longest = list(pauses), held(part)
        if not left:
            raise OSError(f"{without_password(url)}: {why}; the same command goes on from here later")
        bar.set_postfix_str(f"{why}, next try in {left[0]} s")
        time.sleep(left.pop(0))
        bar.set_postfix_str("")


def fetch_once(session, url, part, timeout, bar, length):
    """Brings what the part lacks: the rest alone if the server gives just that, else the whole.

    The tags are compared here and not by the server (If-Range): not every server does, and none does for weak tags.
    """
    import requests

    n_held, whole, tag = resume_point(part)
    fits = n_held > 0 and length in (None, whole)
    if fits and n_held == whole:
        return
    if fits and tag:  # without a tag, nothing tells whether the server still has the same version
        with answer(session, "GET", url, timeout, {"Range": f"bytes={n_held}-"}) as reply:
            if is_rest(reply, n_held, whole, tag):
                return write(reply, part, n_held, whole, tag, bar)
    bar.update(-n_held)
    with answer(session, "GET", url, timeout) as reply:
        n_bytes, tag = described(reply)
        if reply.status_code != 200 or length not in (None, n_bytes):
            known = "" if length is None else f" of {length:,}"
            raise requests.ConnectionError(f"the server sends {n_bytes:,} bytes{known}, status {reply.status_code}")
        write(reply, part, 0, n_bytes, tag, bar)


def write(reply, part, at, whole, tag, bar):
    """Writes a reply's body to the part from the place `at` on; bytes that are there and equal are passed over.

    Only places are written to, and nothing is cut off but what differs: two processes may do this to one part at the
    same time, as they do where files can't be locked.
    """
    import requests

    part.touch()
    with open(part, "r+b") as file:
        file.seek(at)
        passing = True
        for chunk in reply.iter_content(2**14):
            if passing and (there := file.read(len(chunk))) != chunk:
                passing = False
                file.seek(at)
                if not chunk.startswith(there):
                    file.truncate()
                etag_file(part).write_text(f"{whole}\n{tag}", "latin-1")
            if not passing:
                file.write(chunk)
            at += len(chunk)
            bar.update(len(chunk))
        if at != whole:
            raise requests.ConnectionError(f"{at:,} of {whole:,} bytes came")
        file.truncate()
        file.flush()
        os.fsync(file.fileno())  # a name must not outlive its bytes when the power fails
    etag_file(part).write_text(f"{whole}\n{tag}", "latin-1")


@contextlib.contextmanager
def answer(session, method, url, timeout, headers=None):
    """The reply to a request, redirects followed, its body not yet read; errors are requests.RequestException."""
    import requests
    from urllib3.exceptions import HTTPError

    try:
        with session.request(method, url, headers=headers, timeout=timeout, stream=True, allow_redirects=True) as reply:
            yield reply
    except (HTTPError, ValueError) as error:  # of an address or a proxy that makes no sense
        raise requests.ConnectionError(reason(error)) from None


def described(reply):
    """(length of the body, the version's tag or ""); requests.RequestException if the head isn't that of a file.

    It is an HTTPError if the next answer would be the same, unless its status is 500 or more.
    """
    import requests

    head, why = reply.headers, ""
    packing = head.get("Content-Encoding", "identity")
    if reply.status_code not in (200, 206):
        why = f"the server answers {reply.status_code} {reply.reason}"
    elif "html" in head.get("Content-Type", ""):
        why = "a web page came in place of the file (does this network want a login?)"
    elif packing != "identity":
        raise requests.RequestException(f"the server packs the file ({packing:.40}), though it was asked not to")
    elif not re.fullmatch("[0-9]{1,15}", head.get("Content-Length", "")) or "Transfer-Encoding" in head:
        why = "the server doesn't say how long the file is"
    if why:
        raise requests.HTTPError(why, response=reply)
    return int(head["Content-Length"]), head.get("ETag") or head.get("Last-Modified") or ""


def is_rest(reply, n_held, whole, tag):
    """Whether a reply's body goes on where n_held of whole bytes of this version end; raises as `described`."""
    if reply.status_code in (400, 416, 501):  # three ways to say: no such range
        return False
    n_bytes, new_tag = described(reply)
    place = re.fullmatch(rf"bytes {n_held}-(\d{{1,15}})/{whole}", reply.headers.get("Content-Range", ""))
    # It may be less than all the rest: what is still missing is asked for next.
    return place is not None and n_held + n_bytes <= int(place[1]) + 1 <= whole and new_tag == tag


def etag_file(part):
    return part.with_name(part.name + ".etag")


def resume_point(part):
    """(bytes that a part holds, bytes of the whole, tag of its version or ""); (0, 0, "") if that isn't known."""
    try:
        whole, tag = etag_file(part).read_text("latin-1").split("\n")
        return part.stat().st_size, int(whole), tag
    except (OSError, ValueError):
        return 0, 0, ""


def held(part):
    """How many bytes of a part needn't be downloaded again, as far as is known."""
    return resume_point(part)[0]


def forget(part):
    """Removes what there is of a part."""
    part.unlink(missing_ok=True)
    etag_file(part).unlink(missing_ok=True)


def without_password(url):
    return re.sub("//[^/]*@", "//", url)


def reason(error):
    """The first cause of a requests error that is the system's or the protocol's, in one short line.

    A server's own words may be in it, so only what can be printed stays.
    """
    from http.client import HTTPException  # here: no start without a download should wait 7 ms for it

    first = error
    while error := error.__context__:
        if isinstance(error, OSError | HTTPException):
            first = error
    words = getattr(first, "strerror", None) or str(first) or type(first).__name__
    return " ".join("".join(c if c.isprintable() else " " for c in words).split())[:200]
