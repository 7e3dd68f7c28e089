import contextlib
import errno
import io
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from subprocess import PIPE

import compare_servers
import pytest
import requests
from store import (
    breaks_after,
    etag_of,
    gpt2_files,
    hangs,
    ignores_range,
    no_length,
    other_body,
    redirects,
    serving,
    silent,
    status,
    web_page,
    wrong_place,
)
from tqdm import tqdm

import model_files.download as module
from errors import DamagedFile
from model_files.download import DATA, FILES, GRAPH, INDEX, SHA256, download
from model_files.fetch import ask_length, fetch


@pytest.fixture(scope="module")
def files():
    return gpt2_files()


@pytest.fixture
def store(files, monkeypatch):
    with serving(files) as store:
        monkeypatch.setenv("GPT2_BASE_URL", store.url)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        yield store


def bring(models_dir, size="355M", sha256=None, pauses=(0, 0, 0), timeout=(60, 60)):
    return download(size, models_dir, sha256 or {}, pauses, timeout)


def content(folder):
    """name -> bytes of what is in a folder; {} if there is none."""
    return {path.name: path.read_bytes() for path in folder.iterdir()} if folder.is_dir() else {}


def whole_files(folder):
    return {name: body for name, body in content(folder).items() if not name.startswith(("part-", "download.lock"))}


def leave_part(store, models_dir, n_bytes, name=GRAPH):
    """A download that broke off after n_bytes of a file."""
    store.faults["GET", name] = [breaks_after(n_bytes)]
    with pytest.raises(OSError, match="the same command goes on from here"):
        bring(models_dir, pauses=())
    assert (models_dir / "355M" / f"part-{name}").stat().st_size == n_bytes
    store.asked.clear()


def test_brings_the_seven_files_and_nothing_else(store, tmp_path, files):
    assert bring(tmp_path / "new" / "models") == tmp_path / "new" / "models" / "355M"
    assert content(tmp_path / "new" / "models" / "355M") == files
    assert store.gets()[-1][0] == DATA


def test_a_complete_folder_needs_no_network(files, tmp_path, monkeypatch):
    monkeypatch.setenv("GPT2_BASE_URL", "no address")
    (tmp_path / "355M").mkdir()
    for name in set(FILES) - {GRAPH}:
        (tmp_path / "355M" / name).write_bytes(files[name])
    assert bring(tmp_path) == tmp_path / "355M"


def test_only_what_is_missing_is_asked_for(store, tmp_path, files):
    bring(tmp_path)
    (tmp_path / "355M" / "vocab.bpe").unlink()
    store.asked.clear()
    bring(tmp_path)
    assert content(tmp_path / "355M") == files
    assert store.asked == [("HEAD", "vocab.bpe", None), ("GET", "vocab.bpe", None)]


def test_resumes_within_the_run(store, tmp_path, files):
    store.faults["GET", GRAPH] = [breaks_after(98_304), breaks_after(147_456)]
    bring(tmp_path)
    assert content(tmp_path / "355M") == files
    ranges = [wanted for name, wanted in store.gets() if name == GRAPH]
    assert ranges == [None, "bytes=98304-", "bytes=245760-"]


def test_resumes_in_the_next_run(store, tmp_path, files):
    leave_part(store, tmp_path, 98_304)
    bring(tmp_path)
    assert content(tmp_path / "355M") == files
    assert store.gets() == [(GRAPH, "bytes=98304-"), (DATA, None)]


def test_a_part_with_all_its_bytes_is_not_asked_for_again(store, tmp_path, files):
    leave_part(store, tmp_path, 98_304)
    (tmp_path / "355M" / f"part-{GRAPH}").write_bytes(files[GRAPH])
    bring(tmp_path)
    assert content(tmp_path / "355M") == files
    assert store.gets() == [(DATA, None)]


def test_pauses_grow_and_begin_anew_when_bytes_have_come(store, tmp_path, monkeypatch, files):
    slept = []
    monkeypatch.setattr(time, "sleep", lambda seconds: slept.append(seconds))
    store.faults["GET", GRAPH] = [status(503), status(500), breaks_after(16_384), status(503), status(503)]
    bring(tmp_path, pauses=(1, 2, 4))
    assert [seconds for seconds in slept if seconds >= 1] == [1, 2, 1, 2, 4]
    assert content(tmp_path / "355M") == files


def test_gives_up_in_the_end_and_keeps_the_part(store, tmp_path, files):
    store.faults["GET", GRAPH] = [breaks_after(16_384)] + 3 * [status(503)]
    with pytest.raises(OSError, match="503.*the same command goes on from here") as error:
        bring(tmp_path, pauses=(0, 0))
    assert not isinstance(error.value, ConnectionError)
    assert whole_files(tmp_path / "355M").keys() == set(FILES) - {GRAPH, DATA}
    assert (tmp_path / "355M" / f"part-{GRAPH}").read_bytes() == files[GRAPH][:16_384]


def test_a_server_that_ignores_range_is_read_past_what_is_held(store, tmp_path, files):
    leave_part(store, tmp_path, 98_304)
    store.faults["GET", GRAPH] = [ignores_range]
    bring(tmp_path)
    assert content(tmp_path / "355M") == files


def test_a_206_from_another_place_makes_it_start_over(store, tmp_path, files):
    leave_part(store, tmp_path, 98_304)
    store.faults["GET", GRAPH] = [wrong_place]
    bring(tmp_path)
    assert content(tmp_path / "355M") == files
    assert store.gets() == [(GRAPH, "bytes=98304-"), (GRAPH, None), (DATA, None)]


def test_a_206_that_is_too_short_is_gone_on_from(store, tmp_path, files):
    def short(handler, body):
        place = f"bytes 98304-{len(body) - 1}/{len(body)}"
        handler.head(206, 50_000, ETag=etag_of(body), Content_Range=place)
        handler.send(body[98_304:][:50_000])

    leave_part(store, tmp_path, 98_304)
    store.faults["GET", GRAPH] = [short]
    bring(tmp_path)
    assert content(tmp_path / "355M") == files
    assert store.gets() == [(GRAPH, "bytes=98304-"), (GRAPH, "bytes=148304-"), (DATA, None)]


def test_a_206_that_is_too_long_makes_it_start_over(store, tmp_path, files):
    def long(handler, body):
        place = f"bytes 98304-{len(body) - 1}/{len(body)}"
        handler.head(206, len(body), ETag=etag_of(body), Content_Range=place)
        handler.send(body)

    leave_part(store, tmp_path, 98_304)
    store.faults["GET", GRAPH] = [long]
    bring(tmp_path)
    assert content(tmp_path / "355M") == files


def test_a_changed_etag_makes_it_start_over(store, tmp_path, files):
    leave_part(store, tmp_path, 98_304)
    store.files[GRAPH] = files[GRAPH][::-1]
    store.files[GRAPH] = b"\n" + store.files[GRAPH][1:]
    bring(tmp_path)
    assert content(tmp_path / "355M") == store.files
    assert store.gets() == [(GRAPH, "bytes=98304-"), (GRAPH, None), (DATA, None)]


def test_a_file_that_became_shorter_than_the_part_makes_it_start_over(store, tmp_path, files):
    leave_part(store, tmp_path, 98_304)
    store.files[GRAPH] = files[GRAPH][:50_000]
    bring(tmp_path)
    assert content(tmp_path / "355M") == store.files


def test_without_an_etag_a_part_is_started_over(store, tmp_path, files):
    leave_part(store, tmp_path, 98_304)
    (tmp_path / "355M" / f"part-{GRAPH}.etag").write_text(f"{len(files[GRAPH])}\n")
    bring(tmp_path)
    assert content(tmp_path / "355M") == files
    assert store.gets() == [(GRAPH, None), (DATA, None)]


@pytest.mark.parametrize("note", ["", "abc", "400001", "x\ny", "\n\n", "-5\nx", "10\n"])
def test_a_part_whose_etag_file_makes_no_sense_is_started_over(store, tmp_path, files, note):
    leave_part(store, tmp_path, 98_304)
    (tmp_path / "355M" / f"part-{GRAPH}.etag").write_text(note)
    bring(tmp_path)
    assert content(tmp_path / "355M") == files


@pytest.mark.parametrize("name", FILES)
def test_a_web_page_in_place_of_a_file_changes_nothing(store, tmp_path, name):
    store.faults["HEAD", name] = [web_page()]
    with pytest.raises(OSError, match=f"{name}: a web page"):
        bring(tmp_path / "models")
    assert not (tmp_path / "models").exists()


@pytest.mark.parametrize("name", FILES)
def test_a_web_page_that_says_it_is_a_file_is_thrown_away(store, tmp_path, name):
    store.faults["GET", name] = [web_page("application/octet-stream")]
    with pytest.raises(DamagedFile, match=f"part-{name}.*thrown away, the same command"):
        bring(tmp_path, sha256={name: SHA256.get(name)})
    assert name not in content(tmp_path / "355M") and f"part-{name}" not in content(tmp_path / "355M")


@pytest.mark.parametrize("code", [405, 501])
def test_a_store_without_head_is_asked_with_get(store, tmp_path, files, code):
    for name in FILES:
        store.faults["HEAD", name] = [status(code)]
    bring(tmp_path)
    assert content(tmp_path / "355M") == files


def test_a_store_that_redirects_is_followed_also_for_the_rest(store, tmp_path, files):
    leave_part(store, tmp_path, 98_304)
    for name in (GRAPH, DATA):
        store.faults["HEAD", name] = [redirects()]
        store.faults["GET", name] = [redirects()]
    bring(tmp_path)
    assert content(tmp_path / "355M") == files
    assert store.gets() == [(GRAPH, "bytes=98304-")] * 2 + [(DATA, None)] * 2


def test_a_graph_of_another_length_than_the_store_first_said_does_not_get_its_name(store, tmp_path):
    store.faults["GET", GRAPH] = [other_body(lambda body: body + b"x")] * 9
    with pytest.raises(OSError, match="bytes of 400,001"):
        bring(tmp_path)
    assert GRAPH not in content(tmp_path / "355M")


def test_a_web_page_in_the_middle_of_a_download_keeps_the_part(store, tmp_path, files):
    leave_part(store, tmp_path, 98_304)
    store.faults["GET", GRAPH] = [web_page()]
    with pytest.raises(OSError, match="a web page"):
        bring(tmp_path)
    assert (tmp_path / "355M" / f"part-{GRAPH}").read_bytes() == files[GRAPH][:98_304]


@pytest.mark.parametrize("code", [403, 404, 500])
def test_an_http_error_names_address_and_status_and_changes_nothing(store, tmp_path, code):
    store.faults["HEAD", "hparams.json"] = [status(code)]
    line = f"^{store.url}/355M/hparams.json: the server answers {code} [A-Za-z ]+$"
    with pytest.raises(OSError, match=line) as error:
        bring(tmp_path / "models")
    assert isinstance(error.value, ConnectionError)
    assert not (tmp_path / "models").exists()


def test_a_404_in_the_middle_is_not_tried_again(store, tmp_path):
    store.faults["GET", GRAPH] = [status(404)]
    with pytest.raises(OSError, match="404"):
        bring(tmp_path)
    assert store.gets()[-2:] == [(INDEX, None), (GRAPH, None)]


def test_a_server_that_does_not_say_the_length_is_refused(store, tmp_path):
    store.faults["HEAD", DATA] = [no_length]
    with pytest.raises(OSError, match="how long"):
        bring(tmp_path / "models")
    assert not (tmp_path / "models").exists()


def test_weights_of_another_length_than_the_index_says_are_not_downloaded(store, tmp_path, files):
    store.files[DATA] = files[DATA][:-4]
    line = f"{len(files[DATA]) - 4:,} bytes.*index asks for.*{len(files[DATA]):,} bytes"
    with pytest.raises(DamagedFile, match=line):
        bring(tmp_path)
    assert DATA not in dict(store.gets())


def test_a_flipped_bit_in_the_weights_is_found_before_they_get_their_name(store, tmp_path, files):
    damaged = bytearray(files[DATA])
    damaged[len(damaged) // 2] ^= 1
    store.files[DATA] = bytes(damaged)
    with pytest.raises(DamagedFile, match="check sum.*thrown away, the same command"):
        bring(tmp_path)
    assert whole_files(tmp_path / "355M").keys() == set(FILES) - {DATA}
    store.files[DATA] = files[DATA]
    bring(tmp_path)
    assert content(tmp_path / "355M") == files


@pytest.mark.parametrize(
    "name, body",
    [
        ("checkpoint", b'model_checkpoint_path: "other"\n'),
        ("hparams.json", b"{"),
        ("hparams.json", b"\xff\xfe"),
        ("hparams.json", b"[" * 100_000),
        (INDEX, b"x" * 1000),
        (GRAPH, b"<?xml version='1.0'?><Error/>"),
    ],
)
def test_a_small_file_that_is_something_else_is_thrown_away(store, tmp_path, name, body):
    store.files[name] = body
    with pytest.raises(DamagedFile, match=name):
        bring(tmp_path)
    assert name not in content(tmp_path / "355M") and f"part-{name}" not in content(tmp_path / "355M")


def test_the_tokenizer_files_must_be_openais(store, tmp_path, gpt2_vocabulary_dir):
    store.files |= content(gpt2_vocabulary_dir)
    bring(tmp_path, sha256=SHA256)
    for name in ("encoder.json", "vocab.bpe"):
        right = store.files[name]
        store.files[name] = right[:-2] + b"x\n"
        (tmp_path / "355M" / name).unlink()
        with pytest.raises(DamagedFile, match=f"{name}.*SHA-256"):
            bring(tmp_path, sha256=SHA256)
        store.files[name] = right
        bring(tmp_path, sha256=SHA256)


def test_index_and_hparams_of_124M_must_be_openais(store, tmp_path, gpt2_vocabulary_dir):
    store.files |= content(gpt2_vocabulary_dir)
    with pytest.raises(DamagedFile, match="hparams.json.*SHA-256"):
        bring(tmp_path, "124M", SHA256)
    # OpenAI's own
    text = '{\n  "n_vocab": 50257,\n  "n_ctx": 1024,\n  "n_embd": 768,\n  "n_head": 12,\n  "n_layer": 12\n}'
    store.files["hparams.json"] = text.encode()
    with pytest.raises(DamagedFile, match="model.ckpt.index.*SHA-256"):
        bring(tmp_path, "124M", SHA256)


def test_a_full_disk_is_noticed_before_anything_is_written(store, tmp_path, monkeypatch, files):
    total = sum(map(len, files.values()))
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=total - 1))
    with pytest.raises(OSError, match="MB more, the disk has"):
        bring(tmp_path / "models")
    assert not (tmp_path / "models").exists()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=total))
    bring(tmp_path / "models")


def test_what_a_part_holds_needs_no_space(store, tmp_path, monkeypatch, files):
    leave_part(store, tmp_path, 98_304)
    usage, rest = shutil.disk_usage(tmp_path), len(files[GRAPH]) - 98_304 + len(files[DATA])
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=rest))
    bring(tmp_path)


def test_a_server_that_hangs_is_given_up(store, tmp_path, files):
    store.faults["HEAD", GRAPH], store.faults["GET", GRAPH] = [silent], [hangs]
    url = f"{store.url}/355M/{GRAPH}"
    with requests.Session() as session, tqdm() as bar:
        with pytest.raises(OSError, match=f"^{url}: .*timed out") as error:
            ask_length(session, url, (60, 0.2))
        assert isinstance(error.value, ConnectionError)
        fetch(session, url, tmp_path / "part", [0] * 99, (60, 0.2), bar)
    assert (tmp_path / "part").read_bytes() == files[GRAPH]


def test_every_request_has_finite_time_outs(store, tmp_path, monkeypatch):
    def noted(self, request, **given):
        timeouts.append(given["timeout"])
        return send(self, request, **given)

    timeouts, send = [], requests.Session.send
    monkeypatch.setattr(requests.Session, "send", noted)
    download("355M", tmp_path, {})
    assert len(timeouts) == 14 and set(timeouts) == {(5, 30)}


@pytest.mark.parametrize("url", ["http://127.0.0.1:1/x", "http://gpt2.invalid/x"])
def test_an_unreachable_host_is_a_connection_error_and_changes_nothing(tmp_path, monkeypatch, url):
    monkeypatch.setenv("GPT2_BASE_URL", url)
    monkeypatch.setenv("NO_PROXY", "*")
    with pytest.raises(ConnectionError, match=r"^can't reach [^ ]+ \([^<>]+\)$"):
        bring(tmp_path / "models")
    assert not (tmp_path / "models").exists()


def test_a_password_in_the_address_is_not_shown(tmp_path, monkeypatch):
    monkeypatch.setenv("GPT2_BASE_URL", "http://me:secret@127.0.0.1:1/x")
    monkeypatch.setenv("NO_PROXY", "*")
    with pytest.raises(ConnectionError, match=r"^can't reach 127.0.0.1:1 \("):
        bring(tmp_path / "models")


def test_a_proxy_that_refuses_is_a_connection_error(tmp_path, monkeypatch):
    monkeypatch.setenv("GPT2_BASE_URL", "http://gpt2.invalid")
    monkeypatch.setenv("NO_PROXY", "")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    with pytest.raises(ConnectionError, match="can't reach gpt2.invalid"):
        bring(tmp_path / "models")


@pytest.mark.parametrize("url", ["no address", "ftp://host/x", "http://", "http://host:99999999/", "http://[1/"])
def test_a_base_url_that_is_no_address_is_a_value_error(tmp_path, monkeypatch, url):
    monkeypatch.setenv("GPT2_BASE_URL", url)
    with pytest.raises(ValueError, match="GPT2_BASE_URL must be an address"):
        bring(tmp_path / "models")
    assert not (tmp_path / "models").exists()


def test_an_empty_base_url_is_openais(monkeypatch):
    monkeypatch.setenv("GPT2_BASE_URL", "")
    assert module.base_url() == "https://openaipublic.blob.core.windows.net/gpt-2/models"


def test_a_folder_that_cannot_be_written_is_said_so(store, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"can't write to .*file/models/355M \(.*--models_dir names another folder"):
        bring(tmp_path / "file" / "models")


def test_the_bar_shows_bytes_rate_and_rest_and_starts_where_a_resume_starts(store, tmp_path, monkeypatch, files):
    stderr = io.StringIO()
    with contextlib.redirect_stderr(stderr):
        bring(tmp_path)
    last = stderr.getvalue().split("\r")[-1]
    kilobytes = f"{sum(map(len, files.values())) / 1000:.0f}k"
    assert f"{kilobytes}/{kilobytes}" in last and "355M: 100%" in last and "B/s" in last and "<00:00" in last
    for name in (GRAPH, DATA):
        (tmp_path / "355M" / name).unlink()
    leave_part(store, tmp_path, 98_304)
    stderr = io.StringIO()
    with contextlib.redirect_stderr(stderr):
        bring(tmp_path)
    assert f"98.3k/{(len(files[GRAPH]) + len(files[DATA])) / 1000:.0f}k" in stderr.getvalue().split("\r")[1]


CUT = partial(ignores_range, n_bytes=16_384)


@pytest.mark.parametrize("faults", [[ignores_range], [status(416), CUT], [breaks_after(16_384), status(503)], []])
def test_the_bar_goes_back_where_a_file_starts_over(store, tmp_path, files, faults):
    leave_part(store, tmp_path, 98_304)
    store.faults["GET", GRAPH] = list(faults)
    if not faults:  # then it's another version
        store.files[GRAPH] = files[GRAPH][:50_000] + b"x" * 350_001
    stderr = io.StringIO()
    with contextlib.redirect_stderr(stderr):
        bring(tmp_path)
    kilobytes = f"{(len(files[GRAPH]) + len(files[DATA])) / 1000:.0f}k"
    assert f" {kilobytes}/{kilobytes} " in stderr.getvalue().split("\r")[-1]


def test_a_leftover_of_another_download_is_no_harm(store, tmp_path, files):
    for name in FILES:
        (tmp_path / "355M").mkdir(exist_ok=True)
        (tmp_path / "355M" / f"part-{name}").write_bytes(b"of a killed run" * 9999)
    (tmp_path / "355M" / f"part-{GRAPH}.etag").write_text("149985\n")
    (tmp_path / "355M" / "download.lock").touch()
    bring(tmp_path)
    assert content(tmp_path / "355M") == files


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP])
def test_a_folder_without_locks_will_do(store, tmp_path, monkeypatch, files, code):
    def refuse(*args):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("fcntl.flock", refuse)
    bring(tmp_path)
    assert content(tmp_path / "355M") == files


def test_packed_bodies_are_not_asked_for(store, tmp_path):
    def answer(handler, body):
        wanted.append(handler.headers["Accept-Encoding"])
        handler.serve(body)

    wanted = []
    store.faults["HEAD", GRAPH], store.faults["GET", GRAPH] = [answer], [answer]
    bring(tmp_path)
    assert wanted == ["identity", "identity"]


ROOT = Path(__file__).resolve().parent.parent
RUN = """
import signal, sys, model_files.checkpoint, requests, tqdm
from model_files.download import download
signal.signal(signal.SIGINT, signal.default_int_handler)  # it is ignored where the tests run in the background
print("ready", flush=True)
sys.stdin.readline()
download('355M', sys.argv[1], {}, (0, 0))
"""


def prepare(models_dir, script=RUN):
    """A process that is to download, once it is told to `go`."""
    command = [sys.executable, "-c", script, str(models_dir)]
    return subprocess.Popen(command, cwd=ROOT, stdin=PIPE, stdout=PIPE, stderr=PIPE, text=True)


def ready(process):
    assert process.stdout.readline() == "ready\n"
    return process


def go(process):
    print(file=process.stdin, flush=True)
    return process


def wait_for(condition):
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_an_interrupt_leaves_a_part_to_go_on_from(store, tmp_path, files):
    store.rate = 400_000
    process = go(prepare(tmp_path))
    wait_for(lambda: store.sent > 200_000)
    process.send_signal(signal.SIGINT)
    errors = process.communicate()[1]
    assert "gpt2: download stopped; the same command goes on from here\n" in errors
    assert errors.endswith("KeyboardInterrupt\n")
    assert process.returncode != 0
    n_bytes = (tmp_path / "355M" / f"part-{GRAPH}").stat().st_size
    store.asked.clear()
    store.rate = None
    bring(tmp_path)
    assert content(tmp_path / "355M") == files
    assert store.gets() == [(GRAPH, f"bytes={n_bytes}-"), (DATA, None)]


FORK = """
import os, sys, model_files.checkpoint, requests, tqdm
from model_files.download import download
for line in sys.stdin:
    pid = os.fork()
    if pid == 0:
        download('355M', line.rstrip("\\n"), {}, (0, 0))
        os._exit(0)
    print(pid, flush=True)
    sys.stdin.readline()  # until then the pid is this child's, even if it has ended
    os.waitpid(pid, 0)
    print("ended", flush=True)
"""


def test_after_sigkill_at_20_random_moments_the_next_run_brings_just_the_rest(store, tmp_path, files):
    rng = random.Random(0)
    total = sum(map(len, files.values()))
    # one process imports all that is needed, and forks another for every download
    forker = subprocess.Popen([sys.executable, "-c", FORK], cwd=ROOT, stdin=PIPE, stdout=PIPE, stderr=PIPE, text=True)
    for i in range(20):
        store.rate, store.sent = 2_000_000, 0
        moment, delay = rng.randrange(total), rng.random() / 50
        print(tmp_path / str(i), file=forker.stdin, flush=True)
        pid = int(forker.stdout.readline())
        wait_for(lambda moment=moment: store.sent >= moment)
        time.sleep(delay)
        os.kill(pid, signal.SIGKILL)
        print(file=forker.stdin, flush=True)
        assert forker.stdout.readline() == "ended\n"
        time.sleep(0.05)  # so that the store has noted what the killed one asked for last
        before = content(tmp_path / str(i) / "355M")
        store.rate = None
        store.asked.clear()
        bring(tmp_path / str(i))
        assert whole_files(tmp_path / str(i) / "355M") == files
        wanted = []
        for name in FILES:
            n_bytes = len(before.get(f"part-{name}", b""))
            if name not in before and n_bytes < len(files[name]):
                wanted.append((name, f"bytes={n_bytes}-" if n_bytes else None))
        assert store.gets() == wanted
    forker.communicate()


def test_two_processes_at_once_bring_each_file_once(store, tmp_path, files):
    store.rate = 1_000_000
    processes = [go(process) for process in [ready(prepare(tmp_path)), ready(prepare(tmp_path))]]
    messages = [process.communicate()[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert content(tmp_path / "355M") == files
    assert sorted(store.gets()) == sorted((name, None) for name in FILES)
    assert sum("another process is downloading" in message for message in messages) == 1


def test_from_random_servers_the_files_come_or_one_line_does():
    counts, _ = compare_servers.compare_all(range(5000, 5012), n_graph=20_000, n_vocab=1000)
    assert counts["came"] >= 12 and counts["killed"] and len(counts) > 5


WITHOUT_LOCKS = """
import errno, fcntl
def refuse(*args):
    raise OSError(errno.ENOLCK, "No locks available")
fcntl.flock = refuse
"""


def test_two_processes_at_once_without_locks_do_each_other_no_harm(store, tmp_path, files):
    store.rate = 1_000_000
    first, second = (ready(prepare(tmp_path, WITHOUT_LOCKS + RUN)) for _ in range(2))
    go(first)
    wait_for(lambda: store.sent > 150_000)  # the first is in the graph
    go(second)
    messages = [process.communicate()[1] for process in (first, second)]
    assert [process.returncode for process in (first, second)] == [0, 0], messages
    assert content(tmp_path / "355M") == files


def test_a_process_that_waits_goes_on_where_a_killed_one_ended(store, tmp_path, files):
    store.rate = 500_000
    second = ready(prepare(tmp_path))
    first = go(prepare(tmp_path))
    wait_for(lambda: store.sent > 100_000)
    go(second)
    assert second.stderr.readline().startswith("gpt2: another process is downloading")
    first.kill()
    first.communicate()
    assert second.wait() == 0
    assert content(tmp_path / "355M") == files
    assert [name for name, _ in store.gets()].count("encoder.json") == 1
