"""prompt_cache.py: a prompt's cache to a file and back, never used wrongly, never lost."""

import fcntl
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
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


def prefilled(path, tokens, params=PARAMS):
    """The cache, and how many positions had to be run for it."""
    run = []

    def counted(tokens, params, n_head, kvcache):
        run.append(len(tokens) - cached_length(kvcache))
        return gpt2_kvcache.prefill(tokens, params, n_head, kvcache)

    return prompt_cache.prefill_with_file(path, tokens, params, N_HEAD, counted), sum(run)


def text(tokens, kvcache, params=PARAMS):
    return gpt2_kvcache.generate(tokens, params, N_HEAD, 30, kvcache=kvcache)


def arrays_of(path):
    """The four arrays of a file, read by NumPy alone."""
    with open(path, "rb") as file:
        return [np.load(file, allow_pickle=False) for _ in range(4)]


def write_arrays(path, model, tokens, kv, check=None):
    """A file as prompt_cache writes it, with a check that fits unless another is given."""
    with open(path, "wb") as file:
        for array in (prompt_cache.fingerprint([model, tokens, kv]) if check is None else check, model, tokens, kv):
            np.save(file, array)


def resaved(path, **changed):
    """Writes the file anew with some arrays changed, as somebody who knows the format would."""
    _, model, tokens, kv = arrays_of(path)
    write_arrays(path, **{"model": model, "tokens": tokens, "kv": kv, **changed})


def is_left_alone(path, tokens=TOKENS):
    """Whether a run leaves the file as it is, uses nothing of it and gives the right text."""
    before = path.read_bytes()
    kvcache, n_run = prefilled(path, tokens)
    assert n_run == len(tokens) - 1 and text(tokens, kvcache) == text(tokens, None)
    return path.read_bytes() == before


def test_the_second_run_computes_nothing_and_writes_the_same_text(tmp_path, capsys):
    path = tmp_path / "saved"
    first, n_first = prefilled(path, TOKENS)
    second, n_second = prefilled(path, TOKENS)
    assert (n_first, n_second) == (11, 0)
    assert all((a == b).all() for (a, _), (b, _) in zip(first, second, strict=True))
    assert text(TOKENS, first) == text(TOKENS, second) == text(TOKENS, None)
    assert "11 positions saved" in (err := capsys.readouterr().err) and "11 of the prompt's 12 tokens reused" in err


def test_a_longer_prompt_runs_only_the_rest_and_the_file_grows(tmp_path):
    path = tmp_path / "saved"
    prefilled(path, TOKENS[:6])
    kvcache, n_run = prefilled(path, TOKENS)
    assert n_run == 6 and text(TOKENS, kvcache) == text(TOKENS, None)
    assert prefilled(path, TOKENS)[1] == 0


def test_a_shorter_prompt_uses_the_file_and_leaves_it(tmp_path):
    path = tmp_path / "saved"
    prefilled(path, TOKENS)
    before = path.read_bytes()
    kvcache, n_run = prefilled(path, TOKENS[:5])
    assert n_run == 0 and text(TOKENS[:5], kvcache) == text(TOKENS[:5], None) and path.read_bytes() == before


def test_a_prompt_with_the_same_beginning_uses_that_and_leaves_the_file(tmp_path):
    path, other = tmp_path / "saved", [*TOKENS[:7], 1, 2, 3]
    assert TOKENS[7] != 1
    prefilled(path, TOKENS)
    before = path.read_bytes()
    kvcache, n_run = prefilled(path, other)
    assert n_run == 2 and text(other, kvcache) == text(other, None) and path.read_bytes() == before


def test_another_prompt_is_told_and_leaves_the_file(tmp_path, capsys):
    path, other = tmp_path / "saved", [(t + 1) % 50 for t in TOKENS]
    prefilled(path, TOKENS)
    before = path.read_bytes()
    kvcache, n_run = prefilled(path, other)
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
    path = tmp_path / "saved"
    prefilled(path, TOKENS)
    before = path.read_bytes()
    _, n_run = prefilled(path, TOKENS, other)
    assert n_run == 11 and path.read_bytes() == before
    assert "made by another model" in capsys.readouterr().err


def changed_copies(array):
    """(what, copy) of one array with a bit changed, signs changed, or numbers, rows or blocks swapped."""
    flat = array.reshape(-1).view(np.uint32)
    for place in (0, 1, 5, 16383, 16384, 2 * 16384 + 7, flat.size - 1):  # a block has 16,384 numbers
        for bit in (0, 8, 23, 31):
            copy = flat.copy()
            copy[place] ^= np.uint32(1 << bit)
            yield f"bit {bit} of {place}", copy
    for distance in (1, 2, 3, 2039, 2 * 2039, 8192, 16384, 2 * 16384, 524288, flat.size - 1):
        copy = flat.copy()
        copy[[0, distance]] ^= np.uint32(1 << 31)
        yield f"signs {distance} apart", copy
        copy = flat.copy()
        copy[[0, distance]] = copy[[distance, 0]]
        yield f"swapped, {distance} apart", copy
    for n_rows in (1, 2039, 2048, array.shape[0] - 1):
        copy = array.copy()
        copy[[0, n_rows]] = copy[[n_rows, 0]]
        yield f"rows {n_rows} apart", copy
    for n_words in (16384, 524288):  # whole blocks, and whole pieces of one thread each
        yield f"blocks of {n_words}", np.concatenate([flat[n_words : 2 * n_words], flat[:n_words], flat[2 * n_words :]])
    yield "negated", -array
    yield "reversed", flat[::-1]


def test_the_fingerprint_sees_every_bit_and_every_order():
    array = np.random.default_rng(0).standard_normal((4100, 256), dtype=np.float32)
    seen = {prompt_cache.fingerprint([array]).tobytes(): "the array itself"}
    for what, copy in changed_copies(array):
        found = prompt_cache.fingerprint([np.ascontiguousarray(copy).view(np.float32).reshape(array.shape)])
        assert found.tobytes() not in seen, (what, seen[found.tobytes()])
        seen[found.tobytes()] = what


def test_the_fingerprint_sees_names_shapes_dtypes_and_the_order_of_arrays():
    a, b = np.arange(6, dtype=np.float32), np.arange(1, 7, dtype=np.float32)
    trees = [{"x": a, "y": b}, {"x": b, "y": a}, {"y": a, "z": b}, [a, b], [b, a], [[a], b], [np.concatenate([a, b])]]
    trees += [[a.reshape(2, 3), b], [a.view(np.int32), b], [a.astype(">f4"), b], [a, b, np.zeros(0, np.float32)]]
    trees += [{"n_head": 3, "x": a}, {"n_head": 4, "x": a}]
    assert len({prompt_cache.fingerprint(tree).tobytes() for tree in trees}) == len(trees)
    assert (prompt_cache.fingerprint({"y": b, "x": a}) == prompt_cache.fingerprint({"x": a, "y": b})).all()
    assert (prompt_cache.fingerprint([a[::2]]) == prompt_cache.fingerprint([a[::2].copy()])).all()


def test_two_sums_of_a_block_agree_as_seldom_as_their_docstring_says(monkeypatch):
    """Two signs changed, the hardest case: with 300 keys the first sums agree half the time, both never."""
    zeros, signs = np.zeros((2, prompt_cache.N_WORDS), np.uint64)
    signs[[0, 5]] = 1 << 63
    n_first = 0
    for seed in range(300):
        keys = np.zeros((2, prompt_cache.N_WORDS), np.uint64)
        keys[:, [0, 5]] = np.random.default_rng(seed).integers(0, 2**64, (2, 2), dtype=np.uint64)
        monkeypatch.setattr(prompt_cache, "KEYS", keys)
        a, b = (prompt_cache.block_sums(words.view(np.uint8)) for words in (zeros, signs))
        n_first += a[:8] == b[:8]
        assert a != b
    assert 100 < n_first < 200


def test_another_number_of_heads_makes_another_model(tmp_path, capsys):
    path = tmp_path / "saved"
    prompt_cache.prefill_with_file(path, TOKENS, PARAMS, 4, gpt2_kvcache.prefill)
    assert is_left_alone(path) and "made by another model" in capsys.readouterr().err


def test_two_rows_of_wte_2039_apart_make_another_model(tmp_path, capsys):
    path, params = tmp_path / "saved", random_params(n_vocab=2100)
    prefilled(path, TOKENS, params)
    params["wte"][[3, 2042]] = params["wte"][[2042, 3]]
    assert prefilled(path, TOKENS, params)[1] == 11 and "made by another model" in capsys.readouterr().err


@pytest.mark.parametrize("what", ["another prompt", "another model", "kv damaged", "kv of another type", "structured"])
def test_a_shorter_file_that_cannot_be_used_is_not_replaced_by_a_longer_prompt(tmp_path, capsys, what):
    path, params = tmp_path / "saved", random_params()
    if what == "another model":
        params["wte"][0, 0] += 1
    prefilled(path, [(t + (what == "another prompt")) % 50 for t in TOKENS[:6]], params)
    kv = arrays_of(path)[3]
    if what == "kv of another type":
        resaved(path, kv=kv.astype(float))
    if what == "structured":
        resaved(path, model=np.zeros(32, [("a", "u1")]))
    if what == "kv damaged":
        path.write_bytes(path.read_bytes().replace(kv.tobytes()[:40], bytes(40)))
    assert is_left_alone(path) and "left alone" in capsys.readouterr().err


def test_every_damaged_file_is_told_and_left_alone_or_holds_the_right_cache(tmp_path, capsys):
    """Cut at every 97th byte, and one byte changed at every 41st."""
    path = tmp_path / "saved"
    kvcache, _ = prefilled(path, TOKENS)
    whole, expected = path.read_bytes(), text(TOKENS, kvcache)
    damaged = [whole[:n] for n in range(0, len(whole), 97)]
    damaged += [whole[:n] + bytes([whole[n] ^ 0x55]) + whole[n + 1 :] for n in range(0, len(whole), 41)]
    for data in damaged:
        path.write_bytes(data)
        kvcache, n_run = prefilled(path, TOKENS)
        assert text(TOKENS, kvcache) == expected and path.read_bytes() == data
        assert n_run == 0 or f"{path}: " in capsys.readouterr().err


def test_a_file_of_the_users_is_never_overwritten(tmp_path):
    path = tmp_path / "thesis.txt"
    path.write_text("chapter 1")
    prefilled(path, TOKENS)
    assert path.read_text() == "chapter 1"


def test_an_old_file_is_left_alone(tmp_path, capsys):
    """An .npz, as former versions wrote it."""
    path = tmp_path / "saved.npz"
    np.savez(path, model=np.zeros(32, np.uint8), tokens=np.array(TOKENS[:5], np.int32), kv=np.zeros(9, np.float32))
    assert is_left_alone(path) and "not a prompt cache; it is left alone" in capsys.readouterr().err


@pytest.mark.parametrize("shape", ["(1000000000000,)", "(-1,)", "(0,)", "()", "'no'", "(" * 3000])
@pytest.mark.parametrize("place", [0, 3])
def test_a_header_that_lies_is_refused(tmp_path, capsys, shape, place):
    path = tmp_path / "saved"
    prefilled(path, TOKENS)
    arrays = arrays_of(path)
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}".encode()
    with open(path, "wb") as file:
        for i, array in enumerate(arrays):
            if i == place:
                file.write(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header)
            else:
                np.save(file, array)
    assert is_left_alone(path) and "damaged" in capsys.readouterr().err


@pytest.mark.parametrize("place", range(4))
def test_pickles_are_refused(tmp_path, capsys, place):
    path = tmp_path / "evil"
    prefilled(path, TOKENS)
    arrays = arrays_of(path)
    arrays[place] = np.full(arrays[place].shape, None, object)
    with open(path, "wb") as file:
        for array in arrays:
            np.save(file, array)
    assert is_left_alone(path) and "damaged" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", ["check", "model", "[n, 1]", "[2, 2]", "float tokens", "0-d", "kv [5]", "kv shorter"])
@pytest.mark.parametrize("with_check", [False, True])
def test_arrays_that_do_not_fit_together_are_refused(tmp_path, capsys, wrong, with_check):
    path = tmp_path / "saved"
    prefilled(path, TOKENS)
    check, model, tokens, kv = arrays_of(path)
    changed = {
        "check": {"check": check[::-1]},
        "model": {"model": model.view("V1")},  # the same 32 bytes
        "[n, 1]": {"tokens": tokens[:, None]},
        "[2, 2]": {"tokens": np.zeros((2, 2), np.int32)},
        "float tokens": {"tokens": tokens.astype(float)},
        "0-d": {"tokens": np.array(TOKENS[0], np.int32)},
        "kv [5]": {"kv": np.zeros(5, np.float32)},
        "kv shorter": {"kv": kv[:, :, :, :5]},
    }[wrong]
    resaved(path, **(changed if with_check else {"check": check, **changed}))
    assert is_left_alone(path) and "damaged" in capsys.readouterr().err


def test_a_file_saved_again_in_fortran_order_is_refused(tmp_path, capsys):
    """All numbers are the same, in another order in the file."""
    path = tmp_path / "saved"
    prefilled(path, TOKENS)
    resaved(path, kv=np.asfortranarray(arrays_of(path)[3]))
    assert b"'fortran_order': True" in path.read_bytes()
    assert is_left_alone(path) and "damaged" in capsys.readouterr().err


def test_a_file_with_something_after_its_arrays_is_left_alone(tmp_path, capsys):
    path = tmp_path / "saved"
    prefilled(path, TOKENS[:6])
    path.write_bytes(path.read_bytes() + b"x")
    assert is_left_alone(path) and "damaged" in capsys.readouterr().err


def test_one_position_is_saved_reused_and_grown_from(tmp_path, capsys):
    path = tmp_path / "saved"
    assert prefilled(path, TOKENS[:2])[1] == 1 and arrays_of(path)[3].shape[3] == 1
    kvcache, n_run = prefilled(path, TOKENS[:2])
    assert n_run == 0 and text(TOKENS[:2], kvcache) == text(TOKENS[:2], None)
    assert "1 of the prompt's 2 tokens reused" in capsys.readouterr().err
    assert prefilled(path, TOKENS)[1] == 10 and prefilled(path, TOKENS)[1] == 0
    assert prefilled(path, TOKENS[:2])[1] == 0


def test_the_file_is_what_its_docstring_says(tmp_path):
    path = tmp_path / "saved"
    kvcache, _ = prefilled(path, TOKENS)
    check, model, tokens, kv = arrays_of(path)
    assert tokens.dtype == np.int32 and tokens.tolist() == TOKENS[:-1]
    assert kv.dtype == np.float32 and (kv == np.stack([kv for kv, _ in kvcache])).all()
    assert (model == prompt_cache.fingerprint({"n_head": N_HEAD, "params": PARAMS})).all()
    assert (check == prompt_cache.fingerprint([model, tokens, kv])).all()


def test_the_weights_are_gone_through_once_a_run(tmp_path, monkeypatch):
    calls, real = [], prompt_cache.fingerprint
    monkeypatch.setattr(prompt_cache, "fingerprint", lambda tree: calls.append(isinstance(tree, dict)) or real(tree))
    for tokens in (TOKENS[:6], TOKENS, TOKENS):
        prefilled(tmp_path / "saved", tokens)
    assert sum(calls) == 3


def is_not_saved(path, tokens, capsys):
    """The reason, if a run gives the right text, saves nothing and leaves nothing behind."""
    before = sorted(os.listdir(path.parent)) if path.parent.is_dir() else None
    capsys.readouterr()
    kvcache, _ = prefilled(path, tokens)
    assert text(tokens, kvcache) == text(tokens, None)
    assert before is None or sorted(os.listdir(path.parent)) == before
    return capsys.readouterr().err.partition("not saved: ")[2].strip()


@pytest.mark.parametrize("call", ["open", "os.replace", "np.save"])
@pytest.mark.parametrize("reason", ["No space left on device", "Read-only file system", "Device or resource busy"])
def test_where_saving_fails_the_text_comes_and_the_old_file_stays(tmp_path, monkeypatch, capsys, call, reason):
    path = tmp_path / "saved"
    prefilled(path, TOKENS[:5])
    before = path.read_bytes()

    def fails(*args, **kwargs):
        if call == "open" and args[1] == "rb":
            return open(*args, **kwargs)
        if call == "np.save":
            args[0].write(b"half of it")
        raise OSError(5, reason)

    where = {"open": (prompt_cache, "open"), "os.replace": (os, "replace"), "np.save": (np, "save")}[call]
    monkeypatch.setattr(*where, fails, raising=False)
    assert is_not_saved(path, TOKENS, capsys) == reason
    assert path.read_bytes() == before


@pytest.mark.parametrize("folder", ["missing", "file"])
def test_a_path_where_no_file_can_be_is_told(tmp_path, capsys, folder):
    (tmp_path / "file").write_text("")
    reason = is_not_saved(tmp_path / folder / "saved", TOKENS, capsys)
    assert reason == {"missing": "No such file or directory", "file": "Not a directory"}[folder]


def test_folders_and_pipes_are_told_and_not_waited_for(tmp_path, capsys):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", Path("/dev/null"), Path("/dev/full")):
        assert prefilled(path, TOKENS)[1] == 11
        assert f"{path}: not a file; it is left alone" in capsys.readouterr().err


def test_a_working_directory_that_is_gone_is_told(tmp_path, capsys, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert is_not_saved(Path("saved"), TOKENS, capsys) == "No such file or directory"
    prefilled(tmp_path / "saved", TOKENS)
    assert "11 positions saved" in capsys.readouterr().err


def test_what_a_link_points_to_is_replaced_and_the_link_stays(tmp_path):
    (tmp_path / "far").mkdir()
    link, target = tmp_path / "link", tmp_path / "far" / "saved"
    link.symlink_to("far/saved")
    for n in (5, 8, 12):  # the first makes the file that the link points to
        prefilled(link, TOKENS[:n])
        assert link.is_symlink() and not target.is_symlink() and len(arrays_of(target)[2]) == n - 1
    assert os.listdir(tmp_path / "far") == ["saved"] and sorted(os.listdir(tmp_path)) == ["far", "link"]


def in_mounts(script, tmp_path):
    """stderr of a shell script in mounts of its own; $run FILE TOKENS saves as many tokens there. Skips if not root."""
    unshare = shutil.which("unshare")
    if not unshare or subprocess.run([unshare, "-m", "true"], capture_output=True).returncode:
        pytest.skip("needs unshare -m")
    (tmp_path / "run").write_text(f'#!/bin/sh\nexec {sys.executable} -c "{WRITER}" "$@"\n')
    (tmp_path / "run").chmod(0o755)
    (tmp_path / "mine").mkdir()
    command = [unshare, "-m", "sh", "-ec", f"run={tmp_path}/run; cd {tmp_path}/mine; {script}"]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT}/tests"}, capture_output=True)
    assert done.returncode == 0, done.stderr
    return done.stderr.decode()


WRITER = """import sys, prompt_cache, gpt2_kvcache
from tiny import random_params, random_tokens
tokens = random_tokens(12)[:int(sys.argv[2])]
kvcache = prompt_cache.prefill_with_file(sys.argv[1], tokens, random_params(), 3, gpt2_kvcache.prefill)
print(gpt2_kvcache.generate(tokens, random_params(), 3, 5, kvcache=kvcache))
"""


def test_a_mounted_file_a_read_only_folder_and_a_full_disk_are_told(tmp_path):
    expected = f"{text(TOKENS, None)[:5]}"
    err = in_mounts(
        "mkdir host ro full; $run host/saved 6; cp host/saved .; cp host/saved ro; : > file;"
        "mount --bind host/saved file; $run file 12 > a; mount --bind ro ro; mount -o remount,bind,ro ro;"
        "$run ro/saved 12 > b; $run ro/new 12 > c; mount -t tmpfs -o size=4k none full; cp saved full;"
        "$run full/saved 12 > d; $run full/new 12 > e; cmp saved full/saved; cmp saved file; ls full ro > left",
        tmp_path,
    )
    lines = [line for line in err.splitlines() if "not saved" in line]
    assert lines == [
        "prompt cache file: not saved: Device or resource busy",
        "prompt cache ro/saved: not saved: Read-only file system",
        "prompt cache ro/new: not saved: Read-only file system",
        "prompt cache full/saved: not saved: No space left on device",
        "prompt cache full/new: not saved: No space left on device",
    ]
    assert all((tmp_path / "mine" / name).read_text().strip() == expected for name in "abcde")
    assert (tmp_path / "mine" / "left").read_text().split() == ["full:", "saved", "ro:", "saved"]


def test_temporary_names_differ_where_process_ids_do_not_and_leftovers_are_ignored(tmp_path, monkeypatch):
    path, names, real = tmp_path / "saved", [], os.replace
    monkeypatch.setattr(os, "getpid", lambda: 1)
    monkeypatch.setattr(os, "replace", lambda part, path: names.append(part) or real(part, path))
    for n in range(2, 12):
        prefilled(path, TOKENS[:n])
        Path(names[-1]).write_bytes(b"left by a killed run")
    assert len(set(names)) == 10 and prefilled(path, TOKENS[:11])[1] == 0


def save_at_once(path, n, barrier):
    """Saves the first n tokens when all others are about to."""

    def wait_and_run(*args):
        result = gpt2_kvcache.prefill(*args)
        barrier.wait(20)
        return result

    prompt_cache.prefill_with_file(path, TOKENS[:n], PARAMS, N_HEAD, wait_and_run)


def no_locks(*args):
    raise OSError(38, "Function not implemented")


@pytest.mark.parametrize("saved", [0, 4])
def test_of_runs_that_save_at_once_the_longest_stays(tmp_path, saved):
    context = multiprocessing.get_context("fork")
    for i in range(10):
        path, barrier = tmp_path / f"saved{i}", context.Barrier(3)
        if saved:
            prefilled(path, TOKENS[:saved])
        runs = [context.Process(target=save_at_once, args=(path, n, barrier)) for n in (12, 6, 9)]
        for run in runs:
            run.start()
        for run in runs:
            run.join(30)
        assert [run.exitcode for run in runs] == [0, 0, 0] and prefilled(path, TOKENS)[1] == 0
        assert not list(tmp_path.glob("*.part"))


@pytest.mark.parametrize("meanwhile", [TOKENS, [*TOKENS[:3], 7, 7, 7, 7], [1, 2, 3]])
def test_what_another_run_saved_meanwhile_stays_also_without_locks(tmp_path, monkeypatch, capsys, meanwhile):
    path = tmp_path / "saved"
    monkeypatch.setattr(fcntl, "flock", no_locks)

    def overtaken(*args):
        prefilled(path, meanwhile)
        return gpt2_kvcache.prefill(*args)

    prompt_cache.prefill_with_file(path, TOKENS[:7], PARAMS, N_HEAD, overtaken)
    assert arrays_of(path)[2].tolist() == meanwhile[:-1] and os.listdir(tmp_path) == ["saved"]
    reason = "another run has saved meanwhile" if meanwhile[0] == TOKENS[0] else "holds another prompt"
    assert f"not saved: {reason}" in capsys.readouterr().err


def test_a_lock_that_nobody_gives_back_is_not_waited_for_without_end(tmp_path, monkeypatch, capsys):
    slept, folder = [], os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)
    monkeypatch.setattr(time, "sleep", slept.append)
    prefilled(tmp_path / "saved", TOKENS)
    os.close(folder)
    assert 5 <= sum(slept) <= 11 and "11 positions saved" in capsys.readouterr().err


def test_kill_9_at_any_moment_of_writing_leaves_the_old_file_or_the_new(tmp_path):
    path = tmp_path / "saved"
    prefilled(path, TOKENS[:5])
    old = path.read_bytes()
    command = [sys.executable, "-c", "import sys; sys.path[:0] = ['tests', '.']\n" + WRITER, "path", "12"]
    command[-2] = str(tmp_path / "copy")
    (tmp_path / "copy").write_bytes(old)
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    new = (tmp_path / "copy").read_bytes()
    assert prefilled(tmp_path / "copy", TOKENS)[1] == 0
    command[-2] = str(path)
    seen = set()
    for i in range(12):
        path.write_bytes(old)
        process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE)
        deadline = time.monotonic() + 20
        while not list(tmp_path.glob("saved.*.part")) and process.poll() is None and time.monotonic() < deadline:
            pass
        for _ in range(i * 300):  # a little later each time
            pass
        process.send_signal(signal.SIGKILL)
        process.communicate()
        left = path.read_bytes()
        assert prefilled(path, TOKENS[:4])[1] == 0
        seen.add(left == old)
    assert seen <= {True, False} and len(new) > len(old)


def test_a_prompt_of_one_token_needs_no_file(tmp_path):
    assert prefilled(tmp_path / "saved", TOKENS[:1]) == (None, 0)
    assert not list(tmp_path.iterdir())


def run(prompt, path):
    command = [sys.executable, "gpt2_kvcache.py", prompt, "--prompt_cache", str(path), "--model_size", "fairytale"]
    return subprocess.run([*command, "--n_tokens_to_generate", "30"], cwd=ROOT, capture_output=True)


@pytest.mark.parametrize("prompt", ["Once upon a time there lived a king", "The cat sat on the mat. " * 80])
def test_command_line_writes_the_same_text_from_the_file_even_past_the_window(tmp_path, prompt):
    path = tmp_path / "saved"
    first, second = run(prompt, path), run(prompt, path)
    command = [sys.executable, "gpt2.py", prompt, "--model_size", "fairytale", "--n_tokens_to_generate", "30"]
    plain = subprocess.run(command, cwd=ROOT, capture_output=True)
    assert first.returncode == second.returncode == 0
    assert first.stdout == second.stdout == plain.stdout != b""
    assert b"saved" in first.stderr and b"reused" in second.stderr
