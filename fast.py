"""Some of gpt2.py's functions, computed faster. No idea of a cache is in here.

Four things are done that gpt2.py leaves out to stay plain:

- Steps between two products work in place, and go through a few rows at a time: these stay in a core's own cache, which
  is several times as fast as memory.
- What the formula says twice is computed once: the mean in layer_norm, the factors in gelu.
- Scores of keys that come after the query are never computed.
- Products of 2 to 32 rows (several prompts at once, several guessed tokens) take the weights as they lie in memory.
  BLAS copies a matrix into an order of its own first, tile by tile, and for so few rows that is most of the work.

All sizes below were found by measuring, on 124M's shape with NumPy 2.4's OpenBLAS 0.3.31 on two cores.
"""

import math

import numpy as np

N_QUERIES, N_SCORES = 128, 400_000  # queries and scores that attention has in hand at a time: 1.6 MB of scores
N_HIDDEN_ROWS = 16  # rows of the hidden layer that GELU has in hand at a time: 200 kB
MOST_ROWS, LEAST_WEIGHTS = 16, 500_000  # plain products are as fast for more rows, and for matrices with fewer numbers
ROWS_OF_W, ROWS_OF_WTE = 64, 768  # how many rows of the matrix one product takes
MOST_ROWS_RIGHT = 10  # with more rows than these a w that isn't wide is faster as the left factor


def gelu(x):
    """gpt2.gelu, in place: sqrt(2 / pi) (x + 0.044715 x^3) is x (a + b x^2)."""
    u = x * x
    u *= math.sqrt(2 / math.pi) * 0.044715
    u += math.sqrt(2 / math.pi)
    u *= x
    y = np.tanh(u, out=u)
    y += 1
    y *= x
    y *= 0.5
    return y


def layer_norm(x, g, b, eps=1e-5):
    """gpt2.layer_norm, in place: the variance is the mean square of what is left without the mean."""
    n_embd = x.shape[-1]
    x = x - x.sum(axis=-1, keepdims=True) / n_embd
    variance = np.vecdot(x, x)[..., None] / n_embd  # [n_seq, 1]
    x /= np.sqrt(variance + eps)
    x *= g
    x += b
    return x


def product(x, w):
    """x @ w, [n, n_in] @ [n_in, n_out] -> [n, n_out] float32.

    A wide w is taken some of its rows at a time, any other as the left factor where that is the faster way.
    """
    n, (n_in, n_out) = len(x), w.shape
    if not 1 < n <= MOST_ROWS or w.size < LEAST_WEIGHTS:
        return x @ w
    if n_in >= n_out:  # as the left factor: ([n_out, n_in] @ [n_in, n]).T -> [n, n_out]
        return np.ascontiguousarray((w.T @ x.T).T) if n > MOST_ROWS_RIGHT else x @ w
    y = x[:, :ROWS_OF_W] @ w[:ROWS_OF_W]  # [n, 64] @ [64, n_out] -> [n, n_out]
    for i in range(ROWS_OF_W, n_in, ROWS_OF_W):
        y += x[:, i : i + ROWS_OF_W] @ w[i : i + ROWS_OF_W]
    return y


def linear(x, w, b):
    """gpt2.linear, the bias added in place."""
    y = product(x, w)  # [n, n_in] -> [n, n_out]
    y += b
    return y


def to_vocabulary(x, wte):
    """x @ wte.T, [n, n_embd] -> logits [n, n_vocab] float32: some rows of wte at a time, as the left factor."""
    if not 1 < len(x) <= 2 * MOST_ROWS:
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
    for i in range(0, len(hidden), N_HIDDEN_ROWS):
        hidden[i : i + N_HIDDEN_ROWS] = gelu(hidden[i : i + N_HIDDEN_ROWS] + c_fc["b"])
    return linear(hidden, **c_proj)  # [n, 4*n_embd] -> [n, n_embd]


def weighted(scores, v):
    """softmax(scores) @ v, where scores are changed; the division comes after the product, where there is less of it.

    scores: [n_head, n_q, n_seq], v: [n_head, n_seq, d_head] -> [n_head, n_q, d_head].
    """
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
    (n_head, n_q, d_head), n_seq = q.shape, k.shape[1]
    q = q / math.sqrt(d_head)
    if n_q == 1:
        return weighted(q @ k.transpose(0, 2, 1), v)  # [n_head, 1, n_seq]
    heads = np.empty_like(q)  # [n_head, n_q, d_head]
    hidden = np.triu(np.full((N_QUERIES, N_QUERIES), -np.inf, np.float32), 1)
    for i in range(0, n_q, N_QUERIES):
        n = min(N_QUERIES, n_q - i)
        n_seen = n_seq - n_q + i + n
        step = max(1, N_SCORES // (n * n_seen))
        for h in range(0, n_head, step):
            some = slice(h, h + step)
            scores = q[some, i : i + n] @ k[some, :n_seen].transpose(0, 2, 1)  # [n_some, n, n_seen]
            scores[:, :, -n:] += hidden[:n, :n]
            heads[some, i : i + n] = weighted(scores, v[some, :n_seen])
    return heads


def attention_of_each(q, kvs):
    """causal_attention for one query of each of several sequences. q: [n_head, n_batch, d_head] -> [n_batch, n_embd].

    kvs: keys and values of each, [2, n_head, n_seq, d_head]. The scores of all stand in one array, the shorter ones
    filled up, so that softmax goes through them once: 2 to 3 % of a step of 8 sequences.
    """
    n_head, n_batch, d_head = q.shape
    q, n_seq = q / math.sqrt(d_head), [kv.shape[2] for kv in kvs]
    scores = np.full((n_batch, n_head, 1, max(n_seq)), -np.inf, np.float32)  # [n_batch, n_head, 1, longest n_seq]
    for i, (k, _) in enumerate(kvs):
        np.matmul(q[:, i : i + 1], k.transpose(0, 2, 1), out=scores[i, :, :, : n_seq[i]])  # [n_head, 1, n_seq]
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    heads = np.empty((n_batch, n_head, 1, d_head), np.float32)  # [n_batch, n_head, 1, d_head]
    for i, (_, v) in enumerate(kvs):
        np.matmul(scores[i, :, :, : n_seq[i]], v, out=heads[i])  # [n_head, 1, d_head]
    heads /= scores.sum(axis=-1, keepdims=True)  # [n_batch, n_head, 1, d_head]
    return heads.reshape(n_batch, n_head * d_head)  # [n_batch, n_head, 1, d_head] -> [n_batch, n_embd]
