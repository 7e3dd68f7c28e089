"""evaluate.py: bits per byte and perplexity of a text."""

import math
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tiny import random_params, random_tokens

import evaluate
import gpt2
from utils import load_encoder_hparams_and_params

ROOT = Path(__file__).resolve().parent.parent
PARAMS, N_HEAD, N_CTX = random_params(), 3, 16


def expected_losses(tokens):
    """By the plain forward pass, a token at a time: from all before it in the first window, then from half a window."""
    step = N_CTX // 2 + 1  # so many tokens does each window after the first predict
    for i in range(1, len(tokens)):
        start = 0 if i <= N_CTX else ((i - N_CTX - 1) // step + 1) * step
        context = tokens[start:i]
        assert i <= N_CTX or N_CTX // 2 <= len(context) <= N_CTX
        p = gpt2.softmax(gpt2.gpt2(context, **PARAMS, n_head=N_HEAD)[-1].astype(float))
        yield -math.log(p[tokens[i]])


@pytest.mark.parametrize("n", [2, 9, 16, 17, 18, 25, 26, 60])
def test_every_token_is_predicted_once_with_half_a_window_of_context(n):
    tokens = random_tokens(n)
    losses = np.concatenate(list(evaluate.text_losses(tokens, PARAMS, N_HEAD)))
    np.testing.assert_allclose(losses, list(expected_losses(tokens)), atol=1e-4)


@pytest.mark.parametrize("name", ["small", "one_head", "wide"])
def test_losses_equal_transformers(name):
    """Cross-entropy of the logits that transformers computed for a whole window (golden)."""
    with np.load(ROOT / "tests" / "golden" / "logits.npz") as golden:
        logits, config = golden[name].astype(float), golden[name + "_config"].tolist()
    n_vocab, n_ctx, n_embd, n_head, n_layer, seed = config
    tokens = random_tokens(n_ctx, n_vocab, seed)
    expected = np.log(np.exp(logits[:-1]).sum(-1)) - logits[np.arange(n_ctx - 1), tokens[1:]]
    params = random_params(n_vocab, n_ctx, n_embd, n_layer, seed)
    np.testing.assert_allclose(np.concatenate(list(evaluate.text_losses(tokens, params, n_head))), expected, atol=1e-4)


@pytest.mark.parametrize("n_ctx", [1, 2, 3])
def test_the_smallest_windows_predict_every_token_once(n_ctx):
    params, tokens = random_params(n_ctx=n_ctx), random_tokens(20)
    losses = np.concatenate(list(evaluate.text_losses(tokens, params, N_HEAD)))
    for i, loss in enumerate(losses, 1):  # by the longest context that a window can hold, or the shortest it may have
        contexts = [tokens[i - n : i] for n in range(max(n_ctx // 2, 1), min(n_ctx, i) + 1)]
        rows = [gpt2.gpt2(context, **params, n_head=N_HEAD)[-1].astype(float) for context in contexts]
        assert min(abs(loss + np.log(gpt2.softmax(row)[tokens[i]])) for row in rows) < 1e-4
    assert len(losses) == 19


def test_perplexities_beyond_a_float_are_written_as_a_power():
    assert evaluate.perplexity(0.0) == "1.00" and evaluate.perplexity(math.log(21.025)) == "21.02"
    assert evaluate.perplexity(2302.6) == "10^1000"


def test_a_text_alone_has_no_separator_at_its_end_and_two_have_one_each(tmp_path):
    encoder, _, _ = load_encoder_hparams_and_params("fairytale")
    n = len(encoder.encode("A wolf"))
    for content, n_tokens, n_documents in (("A wolf", n, 1), ("A wolf\n<|endoftext|>\nA wolf", 2 * n + 2, 2)):
        (tmp_path / "text").write_text(content)
        printed = run(tmp_path / "text").stdout.splitlines()[1]
        assert printed == f"({n_tokens} tokens, {6 * n_documents} bytes, documents: {n_documents})"


@pytest.mark.parametrize("chunk", [1, 3, 8])
def test_the_size_of_the_pieces_changes_nothing(monkeypatch, chunk):
    tokens = random_tokens(50)
    expected = np.concatenate(list(evaluate.text_losses(tokens, PARAMS, N_HEAD)))
    monkeypatch.setattr(evaluate, "PIECE", chunk)
    losses = np.concatenate(list(evaluate.text_losses(tokens, PARAMS, N_HEAD)))
    np.testing.assert_allclose(losses, expected, atol=1e-5)


def run(*arguments):
    command = [sys.executable, "evaluate.py", *map(str, arguments), "--model_size", "fairytale"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


TALE = "There was once a king who had three daughters. The youngest was so fair that the sun himself wondered.\n"


def test_command_line_prints_bits_per_byte_and_perplexity(tmp_path):
    path = tmp_path / "tale.txt"
    path.write_text(TALE, encoding="utf-8")
    result = run(path)
    bits, perplexity = map(float, re.match(r"([\d.]+) bits per byte, perplexity ([\d.]+) ", result.stdout).groups())
    n_tokens, n_bytes = map(int, re.search(r"\((\d+) tokens, (\d+) bytes", result.stdout).groups())
    assert n_bytes == len(TALE.encode()) and 0.5 < bits < 4
    assert bits * n_bytes * math.log(2) == pytest.approx(n_tokens * math.log(perplexity), rel=1e-3)


def test_separators_are_no_bytes_of_the_text(tmp_path):
    path = tmp_path / "tales.txt"
    path.write_text(f"{TALE}\n<|endoftext|>\n" * 2, encoding="utf-8")
    result = run(path)
    assert f"{2 * len(TALE.encode())} bytes, documents: 2" in result.stdout


@pytest.mark.parametrize("form", ["{0}{1}\n{0}{1}\n", "{0}{1}\n{1}\n{0}{1}", "{1}\n{0}{1}\n{0}"])
def test_separators_count_as_such_wherever_they_stand_alone_on_a_line(tmp_path, form):
    path = tmp_path / "tales.txt"
    path.write_text(form.format(TALE, "<|endoftext|>"), encoding="utf-8")
    n_bytes = 2 * len(TALE.encode())
    assert re.search(rf"\b({n_bytes - 2}|{n_bytes - 1}) bytes, documents: 2", run(path).stdout)


@pytest.mark.parametrize("content", [b"", b"\n<|endoftext|>\n", b"\xff\xff"])
def test_a_file_without_text_is_one_line_and_status_2(tmp_path, content):
    path = tmp_path / "empty.txt"
    path.write_bytes(content)
    result = run(path)
    assert result.returncode == 2 and result.stdout == "" and len(result.stderr.splitlines()) == 1
