"""batch.py: several prompts together, each with the text that it gets alone."""

import copy
import itertools
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tiny import arrays, random_params, random_tokens

import batch
import fast
import gpt2
import gpt2_kvcache
from kvcache import empty_entry, extend
from sampling import greedy, sampler
from utils import load_encoder_hparams_and_params

ROOT = Path(__file__).resolve().parent.parent
PARAMS, N_HEAD = random_params(), 3
PROMPTS = [random_tokens(n, seed=n) for n in (1, 2, 5, 9, 16, 17, 40, 3)]
FAIRYTALE_PROMPTS = [
    "Once upon a time",
    "The king said to his daughter, 'You shall",
    "",
    "In the middle of the dark forest stood a little house, and in that house there lived an old woman who",
    "'Who are you?' asked the wolf.",
    "One day the youngest of the three brothers",
    "A",
    "There was once a poor miller. " * 30,
]


def test_every_prompt_gets_the_ids_it_gets_alone():
    together = list(batch.stream_batch([(p, greedy) for p in PROMPTS], PARAMS, N_HEAD, 40))
    for prompt, new in zip(PROMPTS, together, strict=True):
        assert new == gpt2.generate(prompt, PARAMS, N_HEAD, 40) == gpt2_kvcache.generate(prompt, PARAMS, N_HEAD, 40)


@pytest.mark.parametrize("batch_size", [1, 2, 3, 100])
def test_the_number_at_once_changes_nothing(batch_size):
    picks = [sampler(1.0, seed=i) for i in range(8)]
    together = list(batch.stream_batch(zip(PROMPTS, picks, strict=True), PARAMS, N_HEAD, 25, batch_size=batch_size))
    for i, (prompt, new) in enumerate(zip(PROMPTS, together, strict=True)):
        assert new == gpt2_kvcache.generate(prompt, PARAMS, N_HEAD, 25, sampler(1.0, seed=i))


def test_each_stops_on_its_own():
    alone = [gpt2.generate(p, PARAMS, N_HEAD, 30, sampler(1.0, seed=1)) for p in PROMPTS]
    end = alone[0][10]
    expected = [list(itertools.takewhile(lambda token: token != end, new)) for new in alone]
    requests = [(p, sampler(1.0, seed=1)) for p in PROMPTS]
    together = list(batch.stream_batch(requests, PARAMS, N_HEAD, 30, end_of_text=end, batch_size=3))
    assert together == expected and len({len(new) for new in together}) > 1


def test_samples_of_one_prompt_branch_from_one_run_of_it(monkeypatch):
    runs, real = [], batch.prefill
    monkeypatch.setattr(batch, "prefill", lambda *args: runs.append(1) or real(*args))
    requests = [(PROMPTS[3], sampler(1.0, seed=i)) for i in range(5)]
    together = list(batch.stream_batch(requests, PARAMS, N_HEAD, 5))
    assert len(runs) == 1
    assert together == [gpt2.generate(PROMPTS[3], PARAMS, N_HEAD, 5, sampler(1.0, seed=i)) for i in range(5)]


def test_prompts_that_begin_alike_run_their_beginning_once(monkeypatch):
    """A few-shot prompt before every line, say."""
    params, shots, n_run = random_params(n_ctx=128), random_tokens(50), []
    prompts = [[*shots, *random_tokens(n, seed=n)] for n in (3, 1, 7, 40)] + [
        shots,
        shots[:40],
        random_tokens(60, seed=9),
    ]
    expected = [gpt2.generate(p, params, N_HEAD, 90) for p in prompts]
    for module in (batch, gpt2_kvcache):
        extended = module.extend
        monkeypatch.setattr(module, "extend", lambda entry, kv, f=extended: n_run.append(kv.shape[2]) or f(entry, kv))
    assert list(batch.stream_batch([(p, greedy) for p in prompts], params, N_HEAD, 90)) == expected
    n_run.clear()
    list(batch.stream_batch([(p, greedy) for p in prompts], params, N_HEAD, 1))
    assert sum(n_run) == 2 * (50 + 3 + 1 + 7 + 40 + 1 + 1 + 60)  # two blocks


def test_samples_of_prompts_that_begin_alike_run_each_prompt_once(monkeypatch):
    params, shots, n_run = random_params(n_ctx=128), random_tokens(50), []
    prompts = [[*shots, *random_tokens(40, seed=n)] for n in (1, 2) for _ in range(5)]
    expected = [gpt2.generate(p, params, N_HEAD, 20) for p in prompts[::5]]
    for module in (batch, gpt2_kvcache):
        extended = module.extend
        monkeypatch.setattr(module, "extend", lambda entry, kv, f=extended: n_run.append(kv.shape[2]) or f(entry, kv))
    new = list(batch.stream_batch([(p, greedy) for p in prompts], params, N_HEAD, 20))
    assert new == [expected[0]] * 5 + [expected[1]] * 5
    n_run.clear()
    list(batch.stream_batch([(p, greedy) for p in prompts], params, N_HEAD, 1))
    assert sum(n_run) <= 2 * (50 + 40 + 40 + 10)


def test_no_tokens_to_write_are_no_reason_to_take_any_prompt():
    with pytest.raises(ValueError, match="id 50"):
        list(batch.stream_batch([([50], greedy)], PARAMS, N_HEAD, 0))


def test_a_step_reads_the_weights_once_for_all(monkeypatch):
    """So does the first one, whose rows are all tokens of these short prompts."""
    rows, real = [], batch.linear
    for module in (batch, fast):
        monkeypatch.setattr(module, "linear", lambda x, w, b: rows.append(len(x)) or real(x, w, b))
    prompts = [p[:5] for p in PROMPTS]
    list(batch.stream_batch([(p, greedy) for p in prompts], PARAMS, N_HEAD, 6))
    n_products = 3 * len(PARAMS["blocks"])
    assert rows == [sum(map(len, prompts))] * n_products + [len(prompts)] * 5 * n_products


def test_attention_for_one_token_of_each_is_that_of_each_alone():
    rng = np.random.default_rng(0)
    entries = [extend(empty_entry(3, 4, 9), rng.standard_normal((2, 3, n, 4), dtype=np.float32)) for n in (1, 7, 3)]
    qkv = rng.standard_normal((3, 36), dtype=np.float32) * 20  # scores in the hundreds: exp would overflow
    alone = [gpt2_kvcache.attend(row, 3, entry) for row, entry in zip(np.split(qkv, 3), entries, strict=True)]
    heads, longer = batch.attend_all(qkv, [1, 2, 3], 3, entries)
    assert heads.dtype == np.float32 and [kv.shape[2] for kv, _ in longer] == [2, 8, 4]
    np.testing.assert_allclose(heads, np.concatenate([row for row, _ in alone]), atol=1e-4)


@pytest.mark.parametrize("join", [1, 2, 4, 100])
def test_prompts_catch_up_alone_or_together_with_the_same_result(monkeypatch, join):
    expected = [gpt2.generate(p, PARAMS, N_HEAD, 30) for p in PROMPTS]
    monkeypatch.setattr(batch, "MOST_TOGETHER", join)
    assert list(batch.stream_batch([(p, greedy) for p in PROMPTS], PARAMS, N_HEAD, 30, batch_size=3)) == expected


def test_zero_tokens_and_no_requests():
    assert list(batch.stream_batch([(p, greedy) for p in PROMPTS], PARAMS, N_HEAD, 0)) == [[]] * 8
    assert list(batch.stream_batch([], PARAMS, N_HEAD, 5)) == []


def test_token_ids_out_of_range_are_refused():
    for bad in ([1, 50], [50], [-1]):
        with pytest.raises(ValueError, match="outside the vocabulary of 50"):
            list(batch.stream_batch([(bad, greedy)], PARAMS, N_HEAD, 5))


def test_no_argument_is_changed_and_logits_are_float32():
    before, prompts = copy.deepcopy(PARAMS), copy.deepcopy(PROMPTS)
    seen = []
    pick = lambda logits: seen.append(logits.dtype) or greedy(logits)  # noqa: E731
    list(batch.stream_batch([(p, pick) for p in prompts], PARAMS, N_HEAD, 20))
    assert prompts == PROMPTS and set(seen) == {np.dtype(np.float32)}
    assert all((a == b).all() for a, b in zip(arrays(PARAMS), arrays(before), strict=True))


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.9, "top_k": 50, "top_p": 0.95}])
def test_eight_fairytale_prompts_past_the_window_equal_eight_single_runs(settings):
    encoder, hparams, params = load_encoder_hparams_and_params("fairytale", None)
    prompts = [encoder.encode(p) or [encoder.end_of_text] for p in FAIRYTALE_PROMPTS]
    requests = [(p, sampler(seed=i, **settings)) for i, p in enumerate(prompts)]
    together = list(batch.stream_batch(requests, params, hparams["n_head"], 300))
    for i, (prompt, new) in enumerate(zip(prompts, together, strict=True)):
        pick = sampler(seed=i, **settings)
        assert new == gpt2_kvcache.generate(prompt, params, hparams["n_head"], 300, pick), f"prompt {i}"


def run(*arguments, stdin=b""):
    command = [sys.executable, "batch.py", *map(str, arguments), "--model_size", "fairytale"]
    return subprocess.run(command, cwd=ROOT, input=stdin, capture_output=True)


def test_command_line_prints_json_lines_in_order(tmp_path):
    prompts = ["Once upon a time", "日本 🙂", "", 'She said "no"']
    (tmp_path / "prompts.txt").write_text("\n".join(prompts) + "\n", encoding="utf-8")
    options = ["--n_tokens_to_generate", 12, "--temperature", 1, "--seed", 7]
    result = run(tmp_path / "prompts.txt", "--num_samples", 2, *options)
    lines = [json.loads(line) for line in result.stdout.decode().splitlines()]
    assert [line["prompt"] for line in lines] == [p for p in prompts for _ in range(2)]
    assert run("-", "--num_samples", 2, *options, stdin="\n".join(prompts).encode()).stdout == result.stdout
    for i, line in enumerate(lines):
        options[-1] = 7 + i % 2
        command = [sys.executable, "gpt2.py", line["prompt"], *map(str, options), "--model_size", "fairytale"]
        alone = subprocess.run(command, cwd=ROOT, capture_output=True)
        assert alone.stdout.decode() == line["continuation"]


@pytest.mark.parametrize(
    ("arguments", "stdin", "message"),
    [
        (["-", "--num_samples", 0], b"a\n", "num_samples must be 1 or more, not 0"),
        (["-", "--batch_size", 0], b"a\n", "batch_size must be 1 or more, not 0"),
        (["-"], b"", "has no prompts"),
        (["-"], b"\n", "has no prompts"),
        (["-"], b"ok\n\xff\n", "isn't UTF-8"),
        (["-", "--n_tokens_to_generate", -1], b"a\n", "n_tokens_to_generate must be 0 or more, not -1"),
        (["-", "--temperature", "nan"], b"a\n", "temperature .* nan"),
    ],
)
def test_bad_input_is_one_line_and_status_2(arguments, stdin, message):
    result = run(*arguments, stdin=stdin)
    assert result.returncode == 2 and result.stdout == b""
    assert len(result.stderr.splitlines()) == 1
    assert __import__("re").search(message, result.stderr.decode())


def test_a_missing_file_is_one_line_and_status_1(tmp_path):
    result = run(tmp_path / "nothing.txt")
    assert result.returncode == 1 and result.stdout == b"" and b"nothing.txt" in result.stderr
    assert len(result.stderr.splitlines()) == 1
