"""Products of a few rows with a large weight matrix: several prompts at once, or several guessed tokens.

One row reads every weight once, at the speed of memory. For more rows BLAS first copies the matrix, tile by tile, into
an order of its own; for so few rows that copy is most of the work. It is cheaper when the tiles come as they lie in
memory. Measured on 124M's shape with NumPy 2.4's OpenBLAS 0.3.31, two cores, in times of one row: eight rows took 3.2,
and take 2.6 this way; docs/kv_cache.md has the table. One row and many rows are plain products.
"""

import numpy as np


def product(x, w):
    """x @ w, [n, n_in] @ [n_in, n_out] -> [n, n_out] float32.

    A wide w is taken some of its rows at a time, any other as the left factor where that is the faster way.
    """
    n, (n_in, n_out) = len(x), w.shape
    if not 1 < n <= 16 or w.size < 500_000:
        return x @ w
    if n_in >= n_out:
        return np.ascontiguousarray((w.T @ x.T).T) if n > 10 else x @ w  # [n_out, n_in] @ [n_in, n] -> [n_out, n]
    y = x[:, :64] @ w[:64]  # [n, 64] @ [64, n_out] -> [n, n_out]
    for i in range(64, n_in, 64):
        y += x[:, i : i + 64] @ w[i : i + 64]
    return y


def linear(x, w, b):
    """gpt2.linear."""
    y = product(x, w)  # [n, n_in] -> [n, n_out]
    y += b
    return y


def to_vocabulary(x, wte):
    """x @ wte.T, [n, n_embd] -> logits [n, n_vocab] float32: some rows of wte at a time, as the left factor."""
    if not 1 < len(x) <= 32:
        return x @ wte.T
    columns = np.ascontiguousarray(x.T)  # [n, n_embd] -> [n_embd, n]
    logits = np.empty((len(x), len(wte)), np.float32)  # [n, n_vocab]
    for i in range(0, len(wte), 768):
        logits[:, i : i + 768] = (wte[i : i + 768] @ columns).T  # [768, n_embd] @ [n_embd, n] -> [n, 768]
    return logits
