"""GPT-2 with a KV cache: what gpt2.py computes, without computing the keys and values of old tokens again.

A cache is a plain value (kvcache.py): a list with one entry per block. It goes into a call and a longer one comes out;
the one that went in stays what it was. What isn't defined here is unchanged, and imported from gpt2.py.
docs/kv_cache.md tells the story.
"""

import math

import numpy as np

from gpt2 import gelu, layer_norm, linear, merge_heads, split_heads, window_start
from kvcache import cached_length, empty_entry, extend
from sampling import greedy, sampler

PREFILL_CHUNK = 256  # tokens of a prompt that one call runs (docs/kv_cache.md, "A prompt in pieces")


def attention(q, k, v):
    """gpt2.attention, for the last n_new queries. q: [n_head, n_new, d_head], k, v: [n_head, n_seq, d_head] -> as q.

    New token i sees keys up to n_past + i: without a cache that is the causal mask, for one new token no mask at all.
    Only the last n_new columns need it. All in place, the division after the product, where there is less to divide:
    NumPy spends as long on these steps over [n_head, n_new, n_seq] as on the products.
    """
    n_new = q.shape[1]
    scores = (q / math.sqrt(q.shape[-1])) @ k.transpose(0, 2, 1)  # [n_head, n_new, n_seq]
    if n_new > 1:
        scores[:, :, -n_new:] += np.triu(np.full((n_new, n_new), -1e10, np.float32), 1)
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    heads = scores @ v  # [n_head, n_new, n_seq] @ [n_head, n_seq, d_head] -> [n_head, n_new, d_head]
    heads /= scores.sum(axis=-1, keepdims=True)
    return heads


def attend(qkv, n_head, kvcache=None):
    """Attention of n_new tokens over the cached positions and themselves. qkv: [n_new, 3*n_embd], what c_attn gives.

    kvcache: one block's entry. -> [n_new, n_embd], the entry with n_new more positions.
    """
    qkv = split_heads(qkv, n_head)  # [n_new, 3*n_embd] -> [3, n_head, n_new, d_head]
    if kvcache is None:
        kvcache = empty_entry(n_head, d_head=qkv.shape[3], n_room=qkv.shape[2])
    kvcache = extend(kvcache, qkv[1:])
    k, v = kvcache[0]  # 2 of [n_head, n_past + n_new, d_head]
    return merge_heads(attention(qkv[0], k, v)), kvcache  # [n_head, n_new, d_head] -> [n_new, n_embd]


def mha(x, c_attn, c_proj, n_head, kvcache=None):
    """Multi-head attention, causal. x: [n_new, n_embd], one block's entry -> the same, longer by n_new positions."""
    qkv = linear(x, **c_attn)  # [n_new, n_embd] -> [n_new, 3*n_embd]
    heads, kvcache = attend(qkv, n_head, kvcache)  # [n_new, 3*n_embd] -> [n_new, n_embd]
    return linear(heads, **c_proj), kvcache  # [n_new, n_embd] -> [n_new, n_embd]


def ffn(x, c_fc, c_proj):
    """gpt2.ffn. Bias and GELU a few rows at a time: these stay in the core's own cache, and a prompt takes 7 % less."""
    hidden = x @ c_fc["w"]  # [n_new, n_embd] -> [n_new, 4*n_embd]
    for i in range(0, len(hidden), 16):
        rows = hidden[i : i + 16]
        rows += c_fc["b"]
        rows[:] = gelu(rows)
    return linear(hidden, **c_proj)  # [n_new, 4*n_embd] -> [n_new, n_embd]


def transformer_block(x, mlp, attn, ln_1, ln_2, n_head, kvcache=None):
    attended, kvcache = mha(layer_norm(x, **ln_1), **attn, n_head=n_head, kvcache=kvcache)
    x = x + attended  # [n_new, n_embd]
    return x + ffn(layer_norm(x, **ln_2), **mlp), kvcache


def check_tokens(tokens, n_vocab):
    """ValueError for an id that isn't in the vocabulary; NumPy would take -1 for the last one."""
    for token in tokens:
        if not 0 <= token < n_vocab:
            raise ValueError(f"token id {token} is outside the vocabulary of {n_vocab}")


def check(inputs, wte, wpe, blocks, n_head, kvcache):
    """ValueError where inputs and cache don't go together with each other or with the weights."""
    n_past, d_head = cached_length(kvcache), wte.shape[1] // n_head
    if kvcache is not None and len(kvcache) != len(blocks):
        raise ValueError(f"the cache has {len(kvcache)} blocks, the model {len(blocks)}")
    for i, (kv, _) in enumerate(kvcache or []):
        if kv.shape != (2, n_head, n_past, d_head):
            got = f"{kv.shape[2]} positions of {kv.shape[1]} heads of {kv.shape[3]} channels"
            raise ValueError(f"block {i} of the cache has {got}, not {n_past} of {n_head} of {d_head}")
    if n_past >= len(inputs):
        raise ValueError(f"nothing to run: {n_past} positions are cached, inputs has {len(inputs)} tokens")
    if len(inputs) > len(wpe):
        raise ValueError(f"inputs has {len(inputs)} tokens, the model's window n_ctx {len(wpe)}")
    check_tokens(inputs[n_past:], len(wte))


def gpt2(inputs, wte, wpe, blocks, ln_f, n_head, kvcache=None, n_logits=None):
    """Runs the tokens of inputs that the cache lacks. -> logits [n_new, n_vocab] float32, the cache of all inputs.

    inputs: the whole sequence, n_seq <= n_ctx token ids, of which the first n_past are cached (n_new = n_seq - n_past).
    n_logits: how many of the last positions are projected to the vocabulary, all of the new ones by default.
    """
    check(inputs, wte, wpe, blocks, n_head, kvcache)
    n_past = cached_length(kvcache)
    if kvcache is None:
        kvcache = [empty_entry(n_head, wte.shape[1] // n_head, len(wpe)) for _ in blocks]
    x = wte[np.asarray(inputs[n_past:])] + wpe[n_past : len(inputs)]  # [n_new] -> [n_new, n_embd]
    longer = []
    for block, entry in zip(blocks, kvcache, strict=True):
        x, entry = transformer_block(x, **block, n_head=n_head, kvcache=entry)
        longer.append(entry)
    if n_logits is not None:
        x = x[len(x) - n_logits :]  # [n_new, n_embd] -> [n_logits, n_embd]
    return layer_norm(x, **ln_f) @ wte.T, longer  # [n_new, n_embd] -> [n_new, n_vocab]


def prefill(inputs, params, n_head, kvcache=None):
    """Runs what the cache lacks, in pieces. -> logits of the last position [n_vocab], the cache of all inputs."""
    for end in range(cached_length(kvcache) + PREFILL_CHUNK, len(inputs), PREFILL_CHUNK):
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
        logits, kvcache = prefill(tokens[start:], params, n_head, kvcache)
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
