"""fast.py computes what gpt2.py computes."""

import numpy as np
import pytest

import fast
import gpt2


def normal(*shape):
    return np.random.default_rng(sum(shape)).standard_normal(shape, dtype=np.float32)


@pytest.mark.parametrize("n", [0, 1, 2, 10, 11, 16, 17])
@pytest.mark.parametrize(("n_in", "n_out"), [(64, 130), (65, 130), (130, 200), (200, 130), (130, 130)])
def test_products_of_a_few_rows(n, n_in, n_out):
    x, w, b = normal(n, n_in), normal(n_in, n_out), normal(n_out)
    y = fast.linear(x, w, b)
    assert y.shape == (n, n_out) and y.dtype == np.float32 and y.flags.c_contiguous
    np.testing.assert_allclose(y, x @ w + b, atol=1e-4)


def test_gelu_and_layer_norm_in_place():
    x, g, b = normal(9, 64) * 5 + 3, normal(64), normal(64) - 1
    kept = x.copy()
    np.testing.assert_allclose(fast.gelu(x), gpt2.gelu(x), atol=1e-6)
    np.testing.assert_allclose(fast.layer_norm(x, g, b), gpt2.layer_norm(x, g, b), atol=1e-5)
    np.testing.assert_allclose(fast.layer_norm(x, g, b, eps=0.3), gpt2.layer_norm(x, g, b, eps=0.3), atol=1e-5)
    assert fast.gelu(x).dtype == fast.layer_norm(x, g, b).dtype == np.float32 and (x == kept).all()


def test_gelu_of_extreme_values_gives_no_warning_and_no_nan():
    for gelu in (gpt2.gelu, fast.gelu):
        assert gelu(np.array([-1e10, -1e4, 1e4, 1e10], np.float32)).tolist() == pytest.approx([0, 0, 1e4, 1e10])


@pytest.mark.parametrize("n", [0, 1, 5, 16, 17, 40])
def test_ffn_in_strips(n):
    x, c_fc, c_proj = normal(n, 8), {"w": normal(8, 32), "b": normal(32)}, {"w": normal(32, 8), "b": normal(8)}
    y = fast.ffn(x, c_fc, c_proj)
    assert y.dtype == np.float32
    np.testing.assert_allclose(y, gpt2.ffn(x, c_fc, c_proj), atol=1e-4)


@pytest.mark.parametrize(("n_queries", "n_scores"), [(1, 1), (2, 30), (3, 10**6), (7, 60), (100, 1)])
@pytest.mark.parametrize(("n_q", "n_seq"), [(1, 1), (1, 9), (9, 9), (2, 9), (7, 9)])
def test_attention_in_pieces_is_masked_attention(monkeypatch, n_queries, n_scores, n_q, n_seq):
    monkeypatch.setattr(fast, "N_QUERIES", n_queries)
    monkeypatch.setattr(fast, "N_SCORES", n_scores)
    q, k, v = normal(4, n_q, 8), normal(4, n_seq, 8), normal(4, n_seq, 8)
    mask = np.where(np.tri(n_q, n_seq, n_seq - n_q, dtype=bool), np.float32(0), np.float32(-np.inf))
    expected = gpt2.attention(q, k, v, mask)
    heads = fast.causal_attention(q, k, v)
    assert heads.dtype == np.float32
    np.testing.assert_allclose(heads, expected, atol=1e-5)


@pytest.mark.parametrize("n", [0, 1, 2, 32, 33])
@pytest.mark.parametrize("n_vocab", [1, 2047, 2048, 4100])
def test_the_product_with_the_vocabulary_in_blocks(n, n_vocab):
    x, wte = normal(n, 16), normal(n_vocab, 16)
    logits = fast.to_vocabulary(x, wte)
    assert logits.shape == (n, n_vocab) and logits.dtype == np.float32
    np.testing.assert_allclose(logits, x @ wte.T, atol=1e-4)
