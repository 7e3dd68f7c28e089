"""GPT-2 with a KV cache: what gpt2.py computes, without computing the keys and values of old tokens again.

A cache is a plain value (kvcache.py): a list with one entry per block. It goes into a call and a longer one comes out;
the one that went in stays what it was. What isn't defined here computes what gpt2.py's functions of the same name do
(fast.py has some of them in a faster form). docs/kv_cache.md tells the story.
"""

import numpy as np

from fast import causal_attention, ffn, layer_norm, linear, to_vocabulary
from gpt2 import layers, merge_heads, split_heads, window_start
from kvcache import cached_length, check, empty_cache, empty_entry, extend
from sampling import at_least, checked_tokens, finite, greedy, is_end, sampler

PREFILL_CHUNK = 512  # tokens of a prompt that one call runs (docs/kv_cache.md, "A prompt in pieces")


def attend(qkv, n_head, kvcache=None, n_out=None):
    """Attention of new tokens: token i sees keys up to n_past + i. qkv: [n_new, 3*n_embd], what c_attn gives.

    kvcache: one block's entry. -> rows of the last n_out tokens [n_out, n_embd], the entry with n_new more positions.
    """
    qkv = split_heads(qkv, n_head)  # [n_new, 3*n_embd] -> [3, n_head, n_new, d_head]
    n_new, d_head = qkv.shape[2:]
    kvcache = extend(kvcache or empty_entry(n_head, d_head, n_room=n_new), qkv[1:])
    q = qkv[0] if n_out is None else qkv[0, :, max(n_new - n_out, 0) :]  # [n_head, n_out, d_head]
    heads = causal_attention(q, *kvcache.kv)  # [n_head, n_out, d_head], 2 of [n_head, n_past + n_new, d_head] -> as q
    return merge_heads(heads), kvcache  # [n_head, n_out, d_head] -> [n_out, n_embd]


def mha(x, c_attn, c_proj, n_head, kvcache=None, n_out=None):
    """Multi-head attention, causal. x: [n_new, n_embd] -> [n_out, n_embd], the entry longer by n_new positions."""
    qkv = linear(x, **c_attn)  # [n_new, n_embd] -> [n_new, 3*n_embd]
    heads, kvcache = attend(qkv, n_head, kvcache, n_out)  # [n_new, 3*n_embd] -> [n_out, n_embd]
    return linear(heads, **c_proj), kvcache  # [n_out, n_embd] -> [n_out, n_embd]


def transformer_block(x, mlp, attn, ln_1, ln_2, n_head, kvcache=None, n_out=None):
    """x: [n_new, n_embd], one block's entry -> [n_out, n_embd], the longer entry.

    Computes only the last n_out rows, all by default; keys and values are kept of all n_new.
    """
    attended, kvcache = mha(layer_norm(x, **ln_1), **attn, n_head=n_head, kvcache=kvcache, n_out=n_out)
    x = x[len(x) - len(attended) :] + attended  # [n_new, n_embd] -> [n_out, n_embd]
    return x + ffn(layer_norm(x, **ln_2), **mlp), kvcache


def gpt2(inputs, wte, wpe, blocks, ln_f, n_head, kvcache=None, n_logits=None):
    """Runs the tokens of inputs that the cache lacks. -> logits [n_out, n_vocab] float32, the cache of all inputs.

    inputs: the whole sequence, n_seq <= n_ctx token ids, of which the first n_past are cached (n_new = n_seq - n_past).
    n_logits: compute only the last n_logits of the new logits, all by default. The last block and the vocabulary run
    for these alone. ValueError where inputs, cache and weights don't go together.
    """
    check(inputs, wte, wpe, blocks, n_head, kvcache)
    n_past = cached_length(kvcache)
    x = wte[np.asarray(inputs[n_past:])] + wpe[n_past : len(inputs)]  # [n_new] -> [n_new, n_embd]
    longer = []
    for block, entry in zip(blocks, kvcache or empty_cache(blocks, n_head, len(wpe)), strict=True):
        n_out = n_logits if len(longer) == len(blocks) - 1 else None
        x, entry = transformer_block(x, **block, n_head=n_head, kvcache=entry, n_out=n_out)
        longer.append(entry)
    return to_vocabulary(layer_norm(x, **ln_f), wte), longer  # [n_out, n_embd] -> [n_out, n_vocab]


def prefill(inputs, params, n_head, kvcache=None, chunk=PREFILL_CHUNK):
    """Runs what the cache lacks, in pieces of about chunk tokens.

    -> logits of the last position [n_vocab], the cache of all inputs.
    """
    for end in range(cached_length(kvcache) + chunk, len(inputs) - chunk // 2, chunk):
        _, kvcache = gpt2(inputs[:end], **params, n_head=n_head, kvcache=kvcache, n_logits=0)
    logits, kvcache = gpt2(inputs, **params, n_head=n_head, kvcache=kvcache, n_logits=1)
    return logits[-1], kvcache  # [1, n_vocab] -> [n_vocab]


def seen(tokens, kvcache, n_ctx):
    """The part of the tokens that the model sees, and the cache if it is still of use, else None.

    It is of none when the window has moved, to fewer tokens than were cached: each then stands at another position.
    """
    window = tokens[window_start(len(tokens), n_ctx) :]
    return window, (kvcache if cached_length(kvcache) < len(window) else None)


def stream(inputs, params, n_head, n_tokens_to_generate, pick=greedy, end_of_text=None, kvcache=None):
    """Yields new ids, n_tokens_to_generate or those before end_of_text (an id or a tuple). pick: [n_vocab] -> id.

    kvcache: of the first tokens of the window, all but the last at most; that it is theirs isn't checked.
    """
    tokens, n_ctx = checked_tokens(inputs, len(params["wte"])), len(params["wpe"])
    for _ in range(n_tokens_to_generate):
        window, kvcache = seen(tokens, kvcache, n_ctx)
        kvcache = kvcache or empty_cache(params["blocks"], n_head, min(len(window) + n_tokens_to_generate, n_ctx))
        logits, kvcache = prefill(window, params, n_head, kvcache)  # after the first step: of one token
        token = pick(finite(logits, layers(window, **params, n_head=n_head)))  # layers run only if logits aren't finite
        if is_end(token, end_of_text):
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
    from command_line import write_text
    from utils import load_encoder_hparams_and_params

    at_least(0, n_tokens_to_generate=n_tokens_to_generate)
    pick = sampler(temperature, top_k, top_p, seed)
    encoder, hparams, params = load_encoder_hparams_and_params(model_size, models_dir)
    inputs = encoder.encode_prompt(prompt)
    n_head, kvcache = hparams["n_head"], None
    if prompt_cache is not None:
        from prompt_cache import prefill_with_file  # here: an ordinary start needn't wait for it

        window, _ = seen(inputs, None, hparams["n_ctx"])
        kvcache = prefill_with_file(prompt_cache, window, params, n_head, prefill)
    new = stream(inputs, params, n_head, n_tokens_to_generate, pick, encoder.end_of_text, kvcache)
    write_text(new, encoder, n_tokens_to_generate)


if __name__ == "__main__":
    from command_line import run

    run(main)
