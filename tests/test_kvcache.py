"""kvcache.py: a cache is a value for everybody: copies, pickles, threads."""

import copy
import pickle
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from provoke_threads import provoke
from tiny import random_params, random_tokens

import gpt2
import gpt2_kvcache
import kvcache as module
from kvcache import Entry, cached_length, empty_entry, extend, truncate

ROOT = Path(__file__).resolve().parent.parent
PARAMS, N_HEAD = random_params(), 3
TOKENS = random_tokens(16)


def run(tokens, kvcache=None):
    return gpt2_kvcache.gpt2(tokens, **PARAMS, n_head=N_HEAD, kvcache=kvcache)


def plain(tokens):
    return gpt2.gpt2(tokens, **PARAMS, n_head=N_HEAD)


COPIES = {"copy": copy.copy, "deepcopy": copy.deepcopy} | {
    f"pickle {protocol}": lambda value, protocol=protocol: pickle.loads(pickle.dumps(value, protocol))
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1)
}


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("n", [1, 5])
def test_two_continuations_of_every_copy_are_right(how, n):
    _, trunk = run(TOKENS[:n])
    kept = [entry.kv.copy() for entry in trunk]
    twin = COPIES[how](trunk)
    assert cached_length(twin) == n and all(isinstance(entry, Entry) for entry in twin)
    for cache in (twin, trunk, twin, truncate(twin, n)):
        for more in ([7], [8, 9]):
            logits, _ = run(TOKENS[:n] + more, cache)
            np.testing.assert_allclose(logits, plain(TOKENS[:n] + more)[n:], atol=1e-5)
    assert all((entry.kv == old).all() for entry, old in zip(trunk, kept, strict=True))


@pytest.mark.parametrize("how", set(COPIES) - {"copy"})
def test_a_copy_has_a_buffer_of_its_own_that_grows(how):
    _, trunk = run(TOKENS[:5])
    twin = COPIES[how](trunk)
    assert not any(np.shares_memory(a.kv, b.kv) for a, b in zip(twin, trunk, strict=True))
    for n in range(6, 17):
        logits, twin = run(TOKENS[:n], twin)
    np.testing.assert_allclose(logits, plain(TOKENS)[-1:], atol=1e-5)


def test_another_process_goes_on_from_a_pickle(tmp_path):
    _, trunk = run(TOKENS[:5])
    (tmp_path / "cache").write_bytes(pickle.dumps(trunk))
    code = (
        "import pickle, sys; sys.path[:0] = ['.', 'tests']; import gpt2_kvcache, tiny\n"
        "cache = pickle.load(open(sys.argv[1], 'rb'))\n"
        "logits, _ = gpt2_kvcache.gpt2(tiny.random_tokens(7), **tiny.random_params(), n_head=3, kvcache=cache)\n"
        "print(logits.argmax(axis=-1).tolist())"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "cache")]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout
    assert printed.strip() == str(plain(random_tokens(7))[5:].argmax(axis=-1).tolist())


def test_threads_that_share_a_cache_overwrite_nothing():
    """tests/provoke_threads.py does 100,000."""
    assert provoke(4_000) == 0


def test_without_the_lock_that_would_show(monkeypatch):
    """One thread stops where it has looked who is alive; meanwhile another claims the same rows."""
    trunk = extend(empty_entry(1, 2, n_room=4), np.zeros((2, 1, 1, 2), np.float32))
    looked, go_on = threading.Event(), threading.Event()
    real, results = module.view, {}

    def slow(buffer, n, views):
        if threading.current_thread().name == "slow":
            looked.set()
            go_on.wait(0.2)  # a thread that waits for the lock can't tell us: then time passes
        return real(buffer, n, views)

    def claim(value):
        results[value] = extend(trunk, np.full((2, 1, 1, 2), value, np.float32))
        go_on.set()

    monkeypatch.setattr(module, "view", slow)
    first = threading.Thread(target=claim, args=(1,), name="slow")
    first.start()
    assert looked.wait(10)
    claim(2)
    first.join(10)
    assert all((entry.kv[:, :, 1] == value).all() for value, entry in results.items())


def test_the_model_goes_on_from_one_cache_in_many_threads():
    _, trunk = run(TOKENS[:5])
    expected = {token: plain([*TOKENS[:5], token, 1, 2])[-1] for token in range(8)}
    results, before = {}, sys.getswitchinterval()

    def go(token):
        kvcache = trunk
        for n, more in enumerate(([token], [token, 1], [token, 1, 2])):
            logits, kvcache = run(TOKENS[:5] + more, kvcache)
            assert cached_length(kvcache) == 6 + n
        results[token] = logits[-1]

    sys.setswitchinterval(1e-6)
    try:
        for _ in range(20):
            threads = [threading.Thread(target=go, args=(token,)) for token in expected]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            for token, logits in expected.items():
                np.testing.assert_allclose(results.pop(token), logits, atol=1e-5)
    finally:
        sys.setswitchinterval(before)
