"""GPT-2 with a KV cache: what gpt2.py computes, without computing the keys and values of old tokens again.

A cache is a plain value (kvcache.py): a list with one entry per block. It goes into a call and a longer one comes out;
the one that went in stays what it was. What isn't defined here is unchanged, and imported from gpt2.py.
docs/kv_cache.md tells the story.
"""

import math

import numpy as np

from few_rows import linear, product, to_vocabulary
from gpt2 import gelu, layer_norm, merge_heads, split_heads, window_start
from kvcache import cached_length, check, empty_cache, empty_entry, extend
from sampling import greedy, sampler

PREFILL_CHUNK = 512  # tokens of a prompt that one call runs (docs/kv_cache.md, "A prompt in pieces")
N_QUERIES, N_SCORES = 128, 400_000  # queries and scores that attention has in hand at a time: 1.6 MB fit a core's cache


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
    A few queries and heads at a time, so that the scores stay in a core's own cache through all steps, and those of
    keys behind the last query at hand are never computed.
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


def attend(qkv, n_head, kvcache=None, n_out=None):
    """Attention of new tokens over the cached positions and themselves. qkv: [n_new, 3*n_embd], what c_attn gives.

    kvcache: one block's entry. -> rows of the last n_out tokens [n_out, n_embd], the entry with n_new more positions.
    """
    qkv = split_heads(qkv, n_head)  # [n_new, 3*n_embd] -> [3, n_head, n_new, d_head]
    n_new, d_head = qkv.shape[2:]
    if kvcache is None:
        kvcache = empty_entry(n_head, d_head, n_room=n_new)
    kvcache = extend(kvcache, qkv[1:])
    q = qkv[0] if n_out is None else qkv[0, :, max(n_new - n_out, 0) :]  # [n_head, n_out, d_head]
    k, v = kvcache[0]  # 2 of [n_head, n_past + n_new, d_head]
    return merge_heads(causal_attention(q, k, v)), kvcache  # [n_head, n_out, d_head] -> [n_out, n_embd]


def mha(x, c_attn, c_proj, n_head, kvcache=None, n_out=None):
    """Multi-head attention, causal. x: [n_new, n_embd] -> [n_out, n_embd], the entry longer by n_new positions."""
    qkv = linear(x, **c_attn)  # [n_new, n_embd] -> [n_new, 3*n_embd]
    heads, kvcache = attend(qkv, n_head, kvcache, n_out)  # [n_new, 3*n_embd] -> [n_out, n_embd]
    return linear(heads, **c_proj), kvcache  # [n_out, n_embd] -> [n_out, n_embd]


def ffn(x, c_fc, c_proj):
    """gpt2.ffn. Bias and GELU a few rows at a time: these stay in the core's own cache, and a prompt takes 7 % less."""
    hidden = product(x, c_fc["w"])  # [n_new, n_embd] -> [n_new, 4*n_embd]
    for i in range(0, len(hidden), 16):
        hidden[i : i + 16] = gelu(hidden[i : i + 16] + c_fc["b"])
    return linear(hidden, **c_proj)  # [n_new, 4*n_embd] -> [n_new, n_embd]


def transformer_block(x, mlp, attn, ln_1, ln_2, n_head, kvcache=None, n_out=None):
    """x: [n_new, n_embd], one block's entry -> [n_out, n_embd], the longer entry.

    n_out: how many of the last rows somebody reads; all n_new by default. Keys and values are kept of all of them.
    """
    attended, kvcache = mha(layer_norm(x, **ln_1), **attn, n_head=n_head, kvcache=kvcache, n_out=n_out)
    x = x[len(x) - len(attended) :] + attended  # [n_new, n_embd] -> [n_out, n_embd]
    return x + ffn(layer_norm(x, **ln_2), **mlp), kvcache


def gpt2(inputs, wte, wpe, blocks, ln_f, n_head, kvcache=None, n_logits=None):
    """Runs the tokens of inputs that the cache lacks. -> logits [n_new, n_vocab] float32, the cache of all inputs.

    inputs: the whole sequence, n_seq <= n_ctx token ids, of which the first n_past are cached (n_new = n_seq - n_past).
    n_logits: of how many of the last positions somebody wants logits; of all new ones by default. The last block and
    the vocabulary run for these alone.
    """
    check(inputs, wte, wpe, blocks, n_head, kvcache)
    n_past = cached_length(kvcache)
    if kvcache is None:
        kvcache = empty_cache(len(blocks), n_head, wte.shape[1] // n_head, len(wpe))
    x = wte[np.asarray(inputs[n_past:])] + wpe[n_past : len(inputs)]  # [n_new] -> [n_new, n_embd]
    longer, n_out = [], [None] * (len(blocks) - 1) + [n_logits]
    for block, entry, n in zip(blocks, kvcache, n_out, strict=True):
        x, entry = transformer_block(x, **block, n_head=n_head, kvcache=entry, n_out=n)
        longer.append(entry)
    return to_vocabulary(layer_norm(x, **ln_f), wte), longer  # [n_logits, n_embd] -> [n_logits, n_vocab]


def prefill(inputs, params, n_head, kvcache=None, chunk=PREFILL_CHUNK):
    """Runs what the cache lacks, in pieces. -> logits of the last position [n_vocab], the cache of all inputs."""
    for end in range(cached_length(kvcache) + chunk, len(inputs), chunk):
        _, kvcache = gpt2(inputs[:end], **params, n_head=n_head, kvcache=kvcache, n_logits=0)
    logits, kvcache = gpt2(inputs, **params, n_head=n_head, kvcache=kvcache, n_logits=1)
    return logits[-1], kvcache  # [1, n_vocab] -> [n_vocab]


def stream(inputs, params, n_head, n_tokens_to_generate, pick=greedy, end_of_text=None, kvcache=None):
    """Yields new token ids one by one; stops after n_tokens_to_generate, or before end_of_text.

    pick: logits [n_vocab] -> token id (sampling.py). kvcache: of the first tokens of the window, if there is one.
    """
    tokens, n_ctx = list(inputs), len(params["wpe"])
    start = window_start(len(tokens), n_ctx)
    for _ in range(n_tokens_to_generate):
        if window_start(len(tokens), n_ctx) != start:  # every token moves to another position: all is to be run again
            start, kvcache = window_start(len(tokens), n_ctx), None
        window = tokens[start:]
        if kvcache is None:
            n_room = min(n_ctx, len(window) + n_tokens_to_generate)
            kvcache = empty_cache(len(params["blocks"]), n_head, params["wpe"].shape[1] // n_head, n_room)
        logits, kvcache = prefill(window, params, n_head, kvcache)
        token = pick(logits)
        if token == end_of_text:
            return
        tokens.append(token)
        yield token


def generate(inputs, params, n_head, n_tokens_to_generate, pick=greedy, end_of_text=None, kvcache=None):
    """The list of new token ids; arguments as in stream."""
    return list(stream(inputs, params, n_head, n_tokens_to_generate, pick, end_of_text, kvcache))


def main(
    prompt: str,
    n_tokens_to_generate: int = 40,
    model_size: str = None,
    models_dir: str = None,
    temperature: float = None,
    top_k: int = None,
    top_p: float = None,
    seed: int = None,
    prompt_cache: str = None,
):
    """Continue a prompt with GPT-2, with a KV cache (gpt2.py writes the same text without one)."""
    from command_line import load, write_text

    pick = sampler(temperature, top_k, top_p, seed)
    encoder, hparams, params = load(n_tokens_to_generate, model_size, models_dir)
    inputs = encoder.encode(prompt) or [encoder.end_of_text]
    n_head, kvcache = hparams["n_head"], None
    if prompt_cache is not None:
        from prompt_cache import load_or_run

        kvcache = load_or_run(
            prompt_cache, inputs[window_start(len(inputs), hparams["n_ctx"]) :], params, n_head, prefill
        )
    new = stream(inputs, params, n_head, n_tokens_to_generate, pick, encoder.end_of_text, kvcache)
    write_text(new, encoder, n_tokens_to_generate)


if __name__ == "__main__":
    from command_line import run

    run(main)
