"""One file from an HTTP server to the disk, however often the connection, the process or the machine breaks off.

The file grows as a part, and a new try asks for the rest alone. Beside the part, `<part>.etag` holds the length of the
whole and the server's tag for that version of the file: two versions are never mixed. Nothing here knows what is right
inside the file; whoever gives a part its final name checks that first.
"""

import os
import re
import time
from urllib.parse import urlsplit


def ask_length(session, url, timeout):
    """The length in bytes of the file at url, by a HEAD request; tried once, for it is the first contact.

    Raises ConnectionError if the host can't be reached, another OSError if it has no such file. session is of requests;
    timeout is (seconds to connect, seconds without a byte).
    """
    import requests

    try:
        with session.head(url, allow_redirects=True, timeout=timeout) as reply:
            return described(reply)[0]
    except requests.ConnectionError as error:
        host = urlsplit(url).netloc.rpartition("@")[2]  # what may stand before is a password
        raise ConnectionError(f"can't reach {host} ({reason(error)})") from None
    except requests.RequestException as error:
        raise OSError(f"{url}: {reason(error)}") from None


def fetch(session, url, part, pauses, timeout, bar):
    """Brings the part (a Path) to its full length, and the bar (of tqdm) with it; OSError if that fails.

    After a break it waits and tries again until the pauses (seconds) are used up, from the first one again whenever
    bytes have come. What came stays for the next call.
    """
    import requests

    left = list(pauses)
    while True:
        n_held = held(part)
        try:
            return fetch_once(session, url, part, timeout, bar)
        except requests.RequestException as error:
            why = reason(error)
            if isinstance(error, requests.HTTPError) and error.response.status_code < 500:
                left = []  # the same question would get the same answer
        if held(part) > n_held:
            left = list(pauses)
        if not left:
            raise OSError(f"{url}: {why}; the same command goes on from here later")
        bar.set_postfix_str(f"{why}, next try in {left[0]} s")
        time.sleep(left.pop(0))
        bar.set_postfix_str("")


def fetch_once(session, url, part, timeout, bar):
    """Appends what the part lacks, or starts it over where the server doesn't go on at its end.

    The tags are compared here and not by the server (If-Range): not every server does, and none does for weak tags.
    """
    import requests

    n_held, whole, tag = resume_point(part)
    if n_held and n_held == whole:
        return
    headers = {"Range": f"bytes={n_held}-"} if n_held else {}
    with session.get(url, headers=headers, stream=True, timeout=timeout) as reply:
        if reply.status_code != 416:  # that says: the file ends before this place
            length, new_tag = described(reply)
        asked = f"bytes {n_held}-{whole - 1}/{whole}"
        if reply.status_code != 206 or reply.headers.get("Content-Range") != asked or new_tag != tag:
            bar.update(-n_held)
            forget(part)
            if reply.status_code != 200:
                raise requests.ConnectionError("the server doesn't go on where the last try ended: starting over")
            whole = length
            etag_file(part).write_text(f"{whole}\n{new_tag}", "latin-1")
        with open(part, "ab") as file:
            for chunk in reply.iter_content(2**14):
                file.write(chunk)
                bar.update(len(chunk))
            file.flush()
            os.fsync(file.fileno())  # a name must not outlive its bytes when the power fails
    if part.stat().st_size != whole:
        raise requests.ConnectionError(f"{part.stat().st_size:,} of {whole:,} bytes came")


def described(reply):
    """(length of the body, the version's tag or ""); OSError if the reply's head isn't that of a file."""
    import requests

    if reply.status_code >= 400:
        raise requests.HTTPError(f"the server answers {reply.status_code} {reply.reason}", response=reply)
    if "html" in reply.headers.get("Content-Type", ""):
        raise OSError(f"{reply.url}: a web page came in place of the file (does this network want a login?)")
    length = reply.headers.get("Content-Length", "")
    if not re.fullmatch("[0-9]{1,15}", length):
        raise OSError(f"{reply.url}: the server doesn't say how long the file is")
    return int(length), reply.headers.get("ETag") or reply.headers.get("Last-Modified") or ""


def etag_file(part):
    return part.with_name(part.name + ".etag")


def resume_point(part):
    """(bytes that a part holds, bytes of the whole, tag of its version); (0, 0, "") if it can't be gone on from."""
    try:
        whole, tag = etag_file(part).read_text("latin-1").split("\n")
        n_held, whole = part.stat().st_size, int(whole)
    except (OSError, ValueError):
        return 0, 0, ""
    # without a tag, nothing tells whether the server still has the same version
    return (n_held, whole, tag) if n_held == whole or (n_held < whole and tag) else (0, 0, "")


def held(part):
    """How many bytes of a part needn't be downloaded again."""
    return resume_point(part)[0]


def forget(part):
    """Removes what there is of a part."""
    part.unlink(missing_ok=True)
    etag_file(part).unlink(missing_ok=True)


def reason(error):
    """The first cause of a requests error that is the system's or the protocol's, in few words."""
    from http.client import HTTPException  # here: no start without a download should wait 7 ms for it

    first = error
    while error := error.__context__:
        if isinstance(error, (OSError, HTTPException)):
            first = error
    return getattr(first, "strerror", None) or str(first) or type(first).__name__
