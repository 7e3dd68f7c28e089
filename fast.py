"""gpt2.py's linear, ffn, attention and projection to the vocabulary, computed faster. No idea of a cache is in here.

Three things are done that gpt2.py leaves out to stay plain:

- Steps between two products go through a few rows at a time and in place: these stay in a core's own cache, which is
  several times as fast as memory.
- Scores of keys that come after the query are never computed.
- Products of 2 to 32 rows (several prompts at once, several guessed tokens) take the weights as they lie in memory.
  BLAS copies a matrix into an order of its own first, tile by tile, and for so few rows that is most of the work.

All sizes below were found by measuring, on 124M's shape with NumPy 2.4's OpenBLAS 0.3.31 on two cores.
"""

import math

import numpy as np

from gpt2 import gelu

N_QUERIES, N_SCORES = 128, 400_000  # queries and scores that attention has in hand at a time: 1.6 MB of scores
N_ROWS = 16  # rows of the hidden layer that GELU has in hand at a time: 200 kB
FEW, SMALL = 16, 500_000  # plain products are as fast for more rows, and for matrices with fewer numbers
ROWS_OF_W, ROWS_OF_WTE = 64, 768  # how many rows of the matrix one product takes
LEFT = 10  # with more rows than these a w that isn't wide is faster as the left factor


def product(x, w):
    """x @ w, [n, n_in] @ [n_in, n_out] -> [n, n_out] float32.

    A wide w is taken some of its rows at a time, any other as the left factor where that is the faster way.
    """
    n, (n_in, n_out) = len(x), w.shape
    if not 1 < n <= FEW or w.size < SMALL:
        return x @ w
    if n_in >= n_out:
        return np.ascontiguousarray((w.T @ x.T).T) if n > LEFT else x @ w  # ([n_out, n_in] @ [n_in, n]).T -> [n, n_out]
    y = x[:, :ROWS_OF_W] @ w[:ROWS_OF_W]  # [n, 64] @ [64, n_out] -> [n, n_out]
    for i in range(ROWS_OF_W, n_in, ROWS_OF_W):
        y += x[:, i : i + ROWS_OF_W] @ w[i : i + ROWS_OF_W]
    return y


def linear(x, w, b):
    """gpt2.linear."""
    y = product(x, w)  # [n, n_in] -> [n, n_out]
    y += b
    return y


def to_vocabulary(x, wte):
    """x @ wte.T, [n, n_embd] -> logits [n, n_vocab] float32: some rows of wte at a time, as the left factor."""
    if not 1 < len(x) <= 2 * FEW:
        return x @ wte.T  # [n, n_embd] @ [n_embd, n_vocab] -> [n, n_vocab]
    columns = np.ascontiguousarray(x.T)  # [n, n_embd] -> [n_embd, n]
    logits = np.empty((len(x), len(wte)), x.dtype)  # [n, n_vocab]
    for i in range(0, len(wte), ROWS_OF_WTE):
        some = slice(i, i + ROWS_OF_WTE)
        logits[:, some] = (wte[some] @ columns).T  # ([768, n_embd] @ [n_embd, n]).T -> [n, 768]
    return logits


def ffn(x, c_fc, c_proj):
    """gpt2.ffn, bias and GELU a few rows at a time."""
    hidden = product(x, c_fc["w"])  # [n, n_embd] -> [n, 4*n_embd]
    for i in range(0, len(hidden), N_ROWS):
        hidden[i : i + N_ROWS] = gelu(hidden[i : i + N_ROWS] + c_fc["b"])
    return linear(hidden, **c_proj)  # [n, 4*n_embd] -> [n, n_embd]


def attention(q, k, v, mask=None):
    """gpt2.attention in place, the division after the product, where there is less to divide.

    mask: [n_q, n_q] float32, added to the scores of the last n_q keys.
    """
    scores = (q / math.sqrt(q.shape[-1])) @ k.transpose(0, 2, 1)  # [n_head, n_q, n_seq]
    if mask is not None:
        scores[:, :, -len(mask) :] += mask
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    heads = scores @ v  # [n_head, n_q, n_seq] @ [n_head, n_seq, d_head] -> [n_head, n_q, d_head]
    heads /= scores.sum(axis=-1, keepdims=True)
    return heads


def causal_attention(q, k, v):
    """Attention of the last n_q positions. q: [n_head, n_q, d_head], k and v: [n_head, n_seq, d_head] -> as q.

    Query i sees keys up to n_seq - n_q + i: without a cache that is the causal mask, for one query no mask at all.
    A few queries and heads at a time; keys after the last query at hand are left out.
    """
    (n_head, n_q, _), n_seq = q.shape, k.shape[1]
    if n_q == 1:
        return attention(q, k, v)
    heads = np.empty_like(q)  # [n_head, n_q, d_head]
    triangle = np.triu(np.full((N_QUERIES, N_QUERIES), -1e10, np.float32), 1)
    for i in range(0, n_q, N_QUERIES):
        n = min(N_QUERIES, n_q - i)
        n_seen, mask = n_seq - n_q + i + n, triangle[:n, :n]
        step = max(1, N_SCORES // (n * n_seen))
        for h in range(0, n_head, step):
            some = slice(h, h + step)
            heads[some, i : i + n] = attention(q[some, i : i + n], k[some, :n_seen], v[some, :n_seen], mask)
    return heads
