"""Some of gpt2.py's functions, computed faster. Nothing here knows a cache: attention just gets all keys and values.

- Steps between two products change their own temporaries, a few rows at a time: these stay in a core's own cache, which
  is several times as fast as memory. What a formula says twice is computed once.
- Most scores of keys that come after the query aren't computed.
- Logits of 2 to 32 rows take the rows of wte as they lie in memory, as the left factor. As the right one BLAS copies
  wte into an order of its own first, which is most of the work: two thirds of the time are left for 2 rows, four
  fifths for 16. (The blocks' own matrices are best left to a plain product.)

Sizes were measured on 124M's shape with OpenBLAS's Haswell (AVX2) and SkylakeX (AVX-512) kernels, on two cores.
"""

import math

import numpy as np

N_QUERIES, N_SCORES = 128, 400_000  # queries and scores that attention has in hand at a time: 1.6 MB of scores
N_HIDDEN_ROWS = 16  # rows of the hidden layer that GELU has in hand at a time: 200 kB
FEW_ROWS, WTE_ROWS = 32, 2048  # up to so many rows of logits take so many rows of wte at a time


def gelu(x):
    """gpt2.gelu with two temporaries: sqrt(2 / pi) (x + 0.044715 x^3) is x (a + b x^2)."""
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
    """gpt2.layer_norm with one temporary: the variance is the mean square of what is left without the mean."""
    n_embd = x.shape[-1]
    x = x - x.sum(axis=-1, keepdims=True) / n_embd
    variance = np.vecdot(x, x)[..., None] / n_embd  # [n_seq, 1]
    x /= np.sqrt(variance + eps)
    x *= g
    x += b
    return x


def linear(x, w, b):
    """gpt2.linear, the bias added in place."""
    y = x @ w  # [n, n_in] @ [n_in, n_out] -> [n, n_out]
    y += b
    return y


def to_vocabulary(x, wte):
    """x @ wte.T, [n, n_embd] -> logits [n, n_vocab] float32."""
    if not 1 < len(x) <= FEW_ROWS:
        return x @ wte.T  # [n, n_embd] @ [n_embd, n_vocab] -> [n, n_vocab]
    columns = np.ascontiguousarray(x.T)  # [n, n_embd] -> [n_embd, n]
    logits = np.empty((len(x), len(wte)), x.dtype)  # [n, n_vocab]
    for i in range(0, len(wte), WTE_ROWS):
        logits[:, i : i + WTE_ROWS] = (wte[i : i + WTE_ROWS] @ columns).T  # ([2048, n_embd] @ [n_embd, n]).T
    return logits


def ffn(x, c_fc, c_proj):
    """gpt2.ffn, bias and GELU a few rows at a time."""
    hidden = x @ c_fc["w"]  # [n, n_embd] -> [n, 4*n_embd]
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
    mask = np.triu(np.full((N_QUERIES, N_QUERIES), -np.inf, np.float32), 1)
    for i in range(0, n_q, N_QUERIES):
        n = min(N_QUERIES, n_q - i)
        n_seen = n_seq - n_q + i + n
        step = max(1, N_SCORES // (n * n_seen))
        for h in range(0, n_head, step):
            some = slice(h, h + step)
            scores = q[some, i : i + n] @ k[some, :n_seen].transpose(0, 2, 1)  # [n_some, n, n_seen]
            scores[:, :, -n:] += mask[:n, :n]
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
