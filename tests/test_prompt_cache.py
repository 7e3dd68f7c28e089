"""prompt_cache.py: a prompt's cache to a file and back, never used wrongly, never lost."""

import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest
from tiny import random_params, random_tokens

import gpt2_kvcache
import prompt_cache
from kvcache import cached_length

ROOT = Path(__file__).resolve().parent.parent
PARAMS, N_HEAD = random_params(), 3
TOKENS = random_tokens(12)


def load_or_run(path, tokens, params=PARAMS):
    """The cache, and how many positions had to be run for it."""
    run = []

    def counted(tokens, params, n_head, kvcache):
        run.append(len(tokens) - cached_length(kvcache))
        return gpt2_kvcache.prefill(tokens, params, n_head, kvcache)

    return prompt_cache.load_or_run(path, tokens, params, N_HEAD, counted), sum(run)


def text(tokens, kvcache, params=PARAMS):
    return gpt2_kvcache.generate(tokens, params, N_HEAD, 30, kvcache=kvcache)


def test_the_second_run_computes_nothing_and_writes_the_same_text(tmp_path, capsys):
    path = tmp_path / "saved.npz"
    first, n_first = load_or_run(path, TOKENS)
    second, n_second = load_or_run(path, TOKENS)
    assert (n_first, n_second) == (11, 0)
    assert all((a == b).all() for (a, _), (b, _) in zip(first, second, strict=True))
    assert text(TOKENS, first) == text(TOKENS, second) == text(TOKENS, None)
    assert "11 positions saved" in (err := capsys.readouterr().err) and "11 of the prompt's 12 tokens reused" in err


def test_a_longer_prompt_runs_only_the_rest_and_the_file_grows(tmp_path):
    path = tmp_path / "saved.npz"
    load_or_run(path, TOKENS[:6])
    kvcache, n_run = load_or_run(path, TOKENS)
    assert n_run == 6 and text(TOKENS, kvcache) == text(TOKENS, None)
    assert load_or_run(path, TOKENS)[1] == 0


def test_a_shorter_prompt_uses_the_file_and_leaves_it(tmp_path):
    path = tmp_path / "saved.npz"
    load_or_run(path, TOKENS)
    before = path.read_bytes()
    kvcache, n_run = load_or_run(path, TOKENS[:5])
    assert n_run == 0 and text(TOKENS[:5], kvcache) == text(TOKENS[:5], None) and path.read_bytes() == before


def test_a_prompt_with_the_same_beginning_uses_that_and_leaves_the_file(tmp_path):
    path, other = tmp_path / "saved.npz", [*TOKENS[:7], 1, 2, 3]
    assert TOKENS[7] != 1
    load_or_run(path, TOKENS)
    before = path.read_bytes()
    kvcache, n_run = load_or_run(path, other)
    assert n_run == 2 and text(other, kvcache) == text(other, None) and path.read_bytes() == before


def test_another_prompt_is_told_and_leaves_the_file(tmp_path, capsys):
    path, other = tmp_path / "saved.npz", [(t + 1) % 50 for t in TOKENS]
    load_or_run(path, TOKENS)
    before = path.read_bytes()
    kvcache, n_run = load_or_run(path, other)
    assert n_run == 11 and text(other, kvcache) == text(other, None) and path.read_bytes() == before
    assert f"{path}: holds another prompt" in capsys.readouterr().err


@pytest.mark.parametrize("part", ["wte", "wpe", "c_attn", "c_proj", "bias", "last block", "n_layer", "n_embd", "n_ctx"])
def test_a_file_of_another_model_is_told_and_left_alone(tmp_path, capsys, part):
    shape = {"n_layer": {"n_layer": 3}, "n_embd": {"n_embd": 24}, "n_ctx": {"n_ctx": 20}}.get(part, {})
    other = random_params(**shape)
    if not shape:
        array = {
            "wte": other["wte"],
            "wpe": other["wpe"],
            "c_attn": other["blocks"][0]["attn"]["c_attn"]["w"],
            "c_proj": other["blocks"][0]["mlp"]["c_proj"]["w"],
            "bias": other["blocks"][0]["ln_1"]["b"],
            "last block": other["blocks"][-1]["mlp"]["c_fc"]["w"],
        }[part]
        array.flat[3] = np.nextafter(array.flat[3], np.float32(9))
    path = tmp_path / "saved.npz"
    load_or_run(path, TOKENS)
    before = path.read_bytes()
    _, n_run = load_or_run(path, TOKENS, other)
    assert n_run == 11 and path.read_bytes() == before
    assert "made by another model" in capsys.readouterr().err


@pytest.mark.parametrize("change", ["negated", "two rows swapped", "two entries swapped", "n_head"])
def test_changes_that_a_plain_sum_would_not_see_make_another_model(change):
    params, n_head = random_params(n_embd=48, n_vocab=400), 3
    before = prompt_cache.fingerprint(params, n_head)
    w = params["wte"]
    if change == "negated":
        w *= -1
    elif change == "two rows swapped":
        w[[3, 9]] = w[[9, 3]]
    elif change == "two entries swapped":
        w[3, 5], w[8, 5] = w[8, 5], w[3, 5]
    else:
        n_head = 4
    assert not np.array_equal(before, prompt_cache.fingerprint(params, n_head))


@pytest.mark.parametrize("what", ["another prompt", "another model", "kv damaged", "kv of another type", "structured"])
def test_a_shorter_file_that_cannot_be_used_is_not_replaced_by_a_longer_prompt(tmp_path, capsys, what):
    path, params = tmp_path / "saved.npz", random_params()
    if what == "another model":
        params["wte"][0, 0] += 1
    load_or_run(path, [(t + (what == "another prompt")) % 50 for t in TOKENS[:6]], params)
    with np.load(path) as arrays:
        content = dict(arrays)
    if what == "kv of another type":
        content["kv"] = content["kv"].astype(float)
    if what == "structured":
        content["model"] = np.zeros(32, [("a", "u1")])
    np.savez(path, **content)
    if what == "kv damaged":
        path.write_bytes(path.read_bytes().replace(content["kv"].tobytes()[:40], bytes(40)))
    before = path.read_bytes()
    kvcache, n_run = load_or_run(path, TOKENS)
    assert n_run == 11 and text(TOKENS, kvcache) == text(TOKENS, None) and path.read_bytes() == before
    assert "left alone" in capsys.readouterr().err


def test_every_damaged_file_is_told_and_left_alone_or_holds_the_right_cache(tmp_path, capsys):
    """Cut at every 97th byte, and one byte changed at every 41st."""
    path = tmp_path / "saved.npz"
    kvcache, _ = load_or_run(path, TOKENS)
    whole, expected = path.read_bytes(), text(TOKENS, kvcache)
    damaged = [whole[:n] for n in range(0, len(whole), 97)]
    damaged += [whole[:n] + bytes([whole[n] ^ 0x55]) + whole[n + 1 :] for n in range(0, len(whole), 41)]
    for data in damaged:
        path.write_bytes(data)
        kvcache, n_run = load_or_run(path, TOKENS)
        assert text(TOKENS, kvcache) == expected and path.read_bytes() == data
        assert n_run == 0 or f"{path}: " in capsys.readouterr().err


def test_a_file_of_the_users_is_never_overwritten(tmp_path):
    path = tmp_path / "thesis.txt"
    path.write_text("chapter 1")
    load_or_run(path, TOKENS)
    assert path.read_text() == "chapter 1"


def test_a_header_that_claims_more_than_the_file_holds_is_refused(tmp_path, capsys):
    path = tmp_path / "bomb.npz"
    header = b"{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000,), }"
    with zipfile.ZipFile(path, "w") as archive:
        for name in ("model", "tokens", "kv"):
            archive.writestr(f"{name}.npy", b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header)
    assert load_or_run(path, TOKENS)[1] == 11 and "damaged" in capsys.readouterr().err


def test_a_compressed_file_is_refused(tmp_path, capsys):
    path = tmp_path / "bomb.npz"
    np.savez_compressed(
        path, model=np.zeros(32, np.uint8), tokens=np.zeros(1, np.int32), kv=np.zeros(10**7, np.float32)
    )
    assert load_or_run(path, TOKENS)[1] == 11 and "damaged" in capsys.readouterr().err


def test_pickles_are_refused(tmp_path, capsys):
    path = tmp_path / "evil.npz"
    np.savez(path, model=np.array([{}], dtype=object), tokens=np.zeros(1, np.int32), kv=np.zeros(1, np.float32))
    assert load_or_run(path, TOKENS)[1] == 11 and "damaged" in capsys.readouterr().err


@pytest.mark.parametrize(
    "wrong", [{"tokens": np.zeros((2, 2), np.int32)}, {"tokens": np.zeros(11)}, {"kv": np.zeros(5)}]
)
def test_arrays_that_do_not_fit_together_are_refused(tmp_path, capsys, wrong):
    path = tmp_path / "saved.npz"
    load_or_run(path, TOKENS)
    with np.load(path) as arrays:
        np.savez(path, **{**arrays, **wrong})
    assert load_or_run(path, TOKENS)[1] == 11 and "damaged" in capsys.readouterr().err


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    path = tmp_path / "saved.npz"
    load_or_run(path, TOKENS[:5])
    before = path.read_bytes()

    def full(file, **arrays):
        file.write(b"half of it")
        raise OSError("No space left on device")

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(OSError, match="No space"):
        load_or_run(path, TOKENS)
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["saved.npz"]


def test_kill_9_at_any_moment_of_writing_leaves_the_old_file_or_the_new(tmp_path):
    path = tmp_path / "saved.npz"
    load_or_run(path, TOKENS[:5])
    old = path.read_bytes()
    writer = (
        "import sys; sys.path[:0] = ['tests', '.']\n"
        "import prompt_cache, gpt2_kvcache\n"
        "from tiny import random_params, random_tokens\n"
        "prompt_cache.load_or_run(sys.argv[1], random_tokens(12), random_params(), 3, gpt2_kvcache.prefill)\n"
    )
    command = [sys.executable, "-c", writer, str(tmp_path / "copy.npz")]
    (tmp_path / "copy.npz").write_bytes(old)
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    new = (tmp_path / "copy.npz").read_bytes()
    assert load_or_run(tmp_path / "copy.npz", TOKENS)[1] == 0
    command[-1] = str(path)
    seen = set()
    for i in range(12):
        path.write_bytes(old)
        process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE)
        deadline = time.monotonic() + 20
        while not list(tmp_path.glob("saved.npz.*.part")) and process.poll() is None and time.monotonic() < deadline:
            pass
        for _ in range(i * 300):  # a little later each time
            pass
        process.send_signal(signal.SIGKILL)
        process.communicate()
        left = path.read_bytes()
        assert load_or_run(path, TOKENS[:4])[1] == 0
        seen.add(left == old)
    assert seen <= {True, False} and len(new) > len(old)


def test_a_prompt_of_one_token_needs_no_file(tmp_path):
    assert load_or_run(tmp_path / "saved.npz", TOKENS[:1]) == (None, 0)
    assert not list(tmp_path.iterdir())


def run(prompt, path):
    command = [sys.executable, "gpt2_kvcache.py", prompt, "--prompt_cache", str(path), "--model_size", "fairytale"]
    return subprocess.run([*command, "--n_tokens_to_generate", "30"], cwd=ROOT, capture_output=True)


@pytest.mark.parametrize("prompt", ["Once upon a time there lived a king", "The cat sat on the mat. " * 80])
def test_command_line_writes_the_same_text_from_the_file_even_past_the_window(tmp_path, prompt):
    path = tmp_path / "saved.npz"
    first, second = run(prompt, path), run(prompt, path)
    command = [sys.executable, "gpt2.py", prompt, "--model_size", "fairytale", "--n_tokens_to_generate", "30"]
    plain = subprocess.run(command, cwd=ROOT, capture_output=True)
    assert first.returncode == second.returncode == 0
    assert first.stdout == second.stdout == plain.stdout != b""
    assert b"saved" in first.stderr and b"reused" in second.stderr
