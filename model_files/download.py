"""OpenAI's files of one GPT-2, from their public store into models_dir/<size>: each is there whole and checked, or not.

A file first grows beside its place as `part-<name>` (fetch.py) and gets its name once it has been checked: by SHA-256
where the sum is known, the weights by the CRC32C of every tensor, which their index holds. The weights come last: where
they are, the rest is.
"""

import contextlib
import hashlib
import json
import os
import shutil
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

from errors import DamagedFile
from model_files.fetch import ask_length, fetch, forget, held

BASE_URL = "https://openaipublic.blob.core.windows.net/gpt-2/models"
SIZES = ("124M", "355M", "774M", "1558M")
INDEX, GRAPH, DATA = "model.ckpt.index", "model.ckpt.meta", "model.ckpt.data-00000-of-00001"
FILES = ("checkpoint", "encoder.json", "hparams.json", "vocab.bpe", INDEX, GRAPH, DATA)
SHA256 = {  # of <name>, the same for all sizes, or of <size>/<name>
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    "124M/hparams.json": "097db6ed93a3d9b8a32532fca9e564c703bed00c73908ecc49d1b05db2199606",
    "124M/model.ckpt.index": "71916f763f9746f9b2a06b12d91996cf1084ae008d0424543d39391c5f2dc687",
}
PAUSES = (1, 2, 4, 8)  # seconds before each new try
TIMEOUT = (5, 30)  # seconds to connect, seconds without a byte


def is_complete(folder):
    """Whether all files are there that running needs (nothing reads TensorFlow's graph)."""
    return all((folder / name).is_file() for name in FILES if name != GRAPH)


def download(size, models_dir, sha256=SHA256, pauses=PAUSES, timeout=TIMEOUT):
    """Completes the folder models_dir/<size> with the files that it lacks, a bar on stderr, and returns its Path.

    GPT2_BASE_URL in the environment names another place than OpenAI's; the files are at <base>/<size>/<name>.
    Raises ConnectionError if the host can't be reached and ValueError if GPT2_BASE_URL is no address, before anything
    is written; DamagedFile if a file isn't what it should be, OSError for other failures. What came by then is kept,
    unless it is damaged, and the next call goes on from there.
    """
    folder = Path(models_dir) / size
    if is_complete(folder):
        return folder
    import requests
    from tqdm import tqdm

    base = base_url()
    urls = {name: f"{base}/{size}/{name}" for name in FILES if not (folder / name).is_file()}
    parts = {name: folder / f"part-{name}" for name in FILES}
    with requests.Session() as session:
        session.headers["Accept-Encoding"] = "identity"  # the file's own bytes: lengths and offsets count these
        lengths = {name: ask_length(session, url, timeout) for name, url in urls.items()}
        check_space(folder, sum(length - held(parts[name]) for name, length in lengths.items()))
        with locked(folder / "download.lock"):
            missing = [name for name in urls if not (folder / name).is_file()]  # another process may have brought some
            total, initial = sum(lengths[name] for name in missing), sum(held(parts[name]) for name in missing)
            with resumable(), tqdm(desc=size, total=total, initial=initial, unit="B", unit_scale=True) as bar:
                for name, part in parts.items():
                    if name in missing:
                        if name == DATA:
                            check_length(urls[DATA], lengths[DATA], folder)
                        fetch(session, urls[name], part, pauses, timeout, bar)
                        verify_part(part, name, sha256.get(name) or sha256.get(f"{size}/{name}"))
                        os.replace(part, folder / name)
                    forget(part)
    with contextlib.suppress(OSError):  # Windows keeps a file that another process has open
        (folder / "download.lock").unlink()  # whoever still waits for it, or makes a new one, finds nothing left to do
    return folder


@contextlib.contextmanager
def resumable():
    """Says after Ctrl-C that nothing is lost."""
    try:
        yield
    except KeyboardInterrupt:
        print("gpt2: download stopped; the same command goes on from here", file=sys.stderr)
        raise


def base_url():
    base = (os.environ.get("GPT2_BASE_URL") or BASE_URL).rstrip("/")
    with contextlib.suppress(ValueError):  # a port or an IPv6 address that is none
        parts = urlsplit(base)
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            return base
    raise ValueError(f"GPT2_BASE_URL must be an address such as {BASE_URL}, not {base!r}")


def check_space(folder, n_bytes):
    free = shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free
    if free < n_bytes:
        raise OSError(f"{folder} needs {n_bytes / 1e6:,.0f} MB more, the disk has {free / 1e6:,.0f} MB free")


@contextlib.contextmanager
def locked(path):
    """One process at a time; the others wait, for what they want is being downloaded.

    The lock is the operating system's, which opens it when the process ends, even by SIGKILL. A lock that is a file's
    mere existence would stay.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open(path, "ab")
    except OSError as error:
        raise OSError(f"can't write to {path.parent} ({error.strerror}); --models_dir names another folder") from None
    with file:
        if not take_lock(file):
            print(f"gpt2: another process is downloading to {path.parent}, waiting for it", file=sys.stderr)
            while not take_lock(file):
                time.sleep(0.2)
        yield


def take_lock(file):
    """Whether the lock was free; if so, it is taken."""
    try:
        if os.name == "nt":
            import msvcrt

            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    return True


def check_length(url, length, folder):
    """Refuses weights that don't fit their index before they are downloaded."""
    from model_files.checkpoint import read_index, shard_sizes

    sizes = shard_sizes(read_index(folder / INDEX))
    if sizes != {DATA.removeprefix("model.ckpt."): length}:
        indexed = ", ".join(f"{shard} of {size:,} bytes" for shard, size in sizes.items())
        raise DamagedFile(f"{url} has {length:,} bytes, {folder / INDEX} asks for {indexed}")


def verify_part(part, name, sha256):
    """Throws the part away and raises DamagedFile unless it is what a file of that name should be."""
    from model_files.checkpoint import check_crc

    try:
        if name == DATA:
            check_crc(part.with_name(INDEX), [part])
        else:
            check_content(part, name, sha256)
    except DamagedFile as error:
        forget(part)
        raise DamagedFile(f"{error}; it is thrown away, the same command downloads it anew") from None


def check_content(part, name, sha256):
    from model_files.checkpoint import read_index

    content = part.read_bytes()
    if sha256 and hashlib.sha256(content).hexdigest() != sha256:
        raise DamagedFile(f"{part}: not the {name} that OpenAI published (another SHA-256 sum)")
    if content.lstrip()[:1] == b"<":
        raise DamagedFile(f"{part}: a web page in place of {name}")
    if name == "checkpoint" and b'"model.ckpt"' not in content:
        raise DamagedFile(f"{part}: doesn't name model.ckpt")
    if name == "hparams.json":
        try:
            json.loads(content)
        except (ValueError, RecursionError):
            raise DamagedFile(f"{part}: not JSON") from None
    if name == INDEX:
        read_index(part)
