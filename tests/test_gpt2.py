"""gpt2.py: the plain forward pass."""

import copy
import math
from pathlib import Path

import numpy as np
import pytest
from tiny import arrays, random_params, random_tokens

import gpt2
from utils import load_encoder_hparams_and_params

GOLDEN = Path(__file__).parent / "golden" / "logits.npz"
SMALL = {"n_head": 3}


@pytest.mark.parametrize("name", ["small", "one_head", "wide"])
def test_logits_equal_transformers(name):
    with np.load(GOLDEN) as golden:
        expected, config = golden[name], golden[name + "_config"].tolist()
    n_vocab, n_ctx, n_embd, n_head, n_layer, seed = config
    params = random_params(n_vocab, n_ctx, n_embd, n_layer, seed)
    logits = gpt2.gpt2(random_tokens(n_ctx, n_vocab, seed), **params, n_head=n_head)
    np.testing.assert_allclose(logits, expected, atol=1e-4, rtol=0)


def test_fairytale_logits_equal_transformers():
    """Every 16th position of a whole window."""
    _, hparams, params = load_encoder_hparams_and_params("fairytale")
    tokens = random_tokens(hparams["n_ctx"], hparams["n_vocab"])
    with np.load(GOLDEN) as golden:
        expected = golden["fairytale"]
    logits = gpt2.gpt2(tokens, **params, n_head=hparams["n_head"])
    np.testing.assert_allclose(logits[::16], expected, atol=1e-4, rtol=0)


def test_gelu_is_the_tanh_form():
    x = np.linspace(-30, 30, 10_001, dtype=np.float32)
    exact = 0.5 * x.astype(float) * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x.astype(float) ** 3)))
    np.testing.assert_allclose(gpt2.gelu(x), exact, atol=1e-6)


def test_gelu_of_extreme_values_gives_no_warning_and_no_nan():
    with np.errstate(all="raise", under="ignore"):
        assert gpt2.gelu(np.array([-1e10, -1e4, 1e4, 1e10], np.float32)).tolist() == pytest.approx([0, 0, 1e4, 1e10])


def test_softmax_sums_to_one_and_stands_large_numbers():
    p = gpt2.softmax(np.array([[1e4, 1e4, -1e4], [0, 0, 0]], np.float32))
    np.testing.assert_allclose(p, [[0.5, 0.5, 0], [1 / 3] * 3], atol=1e-6)


def test_layer_norm_has_mean_zero_and_variance_one():
    x = np.random.default_rng(0).standard_normal((7, 64), dtype=np.float32) * 5 + 3
    y = gpt2.layer_norm(x, np.ones(64, np.float32), np.zeros(64, np.float32))
    np.testing.assert_allclose(y.mean(-1), 0, atol=1e-6)
    np.testing.assert_allclose(y.var(-1), 1, atol=1e-4)


def test_later_tokens_do_not_change_earlier_logits():
    params, tokens = random_params(), random_tokens(16)
    whole = gpt2.gpt2(tokens, **params, **SMALL)
    for n in (1, 5, 15):
        np.testing.assert_allclose(gpt2.gpt2(tokens[:n], **params, **SMALL), whole[:n], atol=1e-5)


def test_every_array_is_float32_on_the_way_to_the_logits(monkeypatch):
    """Wraps every function of the forward pass and looks at what goes in and what comes out."""
    seen = []

    def watched(function):
        def call(*args, **kwargs):
            result = function(*args, **kwargs)
            seen.extend(a for a in arrays([args, kwargs, result]) if a.dtype.kind == "f")
            return result

        return call

    for name in ("gelu", "softmax", "layer_norm", "linear", "ffn", "split_heads", "merge_heads", "attention", "mha"):
        monkeypatch.setattr(gpt2, name, watched(getattr(gpt2, name)))
    seen.append(gpt2.gpt2(random_tokens(16), **random_params(), **SMALL))
    assert len(seen) > 100 and {a.dtype for a in seen} == {np.dtype(np.float32)}


def test_no_argument_is_changed():
    params, tokens = random_params(), random_tokens(10)
    before, tokens_before = copy.deepcopy(params), list(tokens)
    gpt2.generate(tokens, params, 3, 20)
    assert tokens == tokens_before
    assert all((a == b).all() for a, b in zip(arrays(params), arrays(before), strict=True))


def test_weights_may_be_read_only():
    params = random_params()
    expected = gpt2.gpt2([1, 2, 3], **params, **SMALL)
    for a in arrays(params):
        a.setflags(write=False)
    assert (gpt2.gpt2([1, 2, 3], **params, **SMALL) == expected).all()


@pytest.mark.parametrize(
    ("n_seq", "start"), [(1, 0), (256, 0), (257, 128), (384, 128), (385, 256), (512, 256), (513, 384)]
)
def test_window_starts_at_the_smallest_half_that_fits(n_seq, start):
    assert gpt2.window_start(n_seq, 256) == start


@pytest.mark.parametrize("n_ctx", [1, 2, 3, 7, 16])
def test_window_never_exceeds_n_ctx_and_is_never_empty(n_ctx):
    half = max(n_ctx // 2, 1)
    for n_seq in range(1, 60):
        start = gpt2.window_start(n_seq, n_ctx)
        assert 1 <= n_seq - start <= n_ctx and start % half == 0
        assert start == 0 or n_seq - (start - half) > n_ctx


def test_generate_picks_the_largest_logit_of_the_last_position():
    params, tokens = random_params(), random_tokens(4)
    new = gpt2.generate(tokens, params, 3, 5)
    for token in new:
        assert token == gpt2.gpt2(tokens, **params, **SMALL)[-1].argmax()
        tokens.append(token)


def test_generate_stops_before_the_end_of_text():
    params, tokens = random_params(), random_tokens(4)
    new = gpt2.generate(tokens, params, 3, 10)
    end = new[3]
    assert gpt2.generate(tokens, params, 3, 10, end_of_text=end) == new[: new.index(end)]
