"""GPT-2 in NumPy: the forward pass, and text from it one token at a time. No cache: every step runs the whole sequence.

gpt2_kvcache.py does the same with a cache; the difference between the two files is what a KV cache is.
Shapes: n_seq tokens, n_embd channels, n_head heads of d_head = n_embd / n_head channels, all float32. No function
changes its arguments or uses what jax.numpy lacks.
Source: Radford et al., "Language Models are Unsupervised Multitask Learners" (2019).
"""

import math

import numpy as np

from sampling import at_least, checked_tokens, finite, greedy, is_end, sampler


def gelu(x):
    """Hendrycks & Gimpel's tanh form (arXiv 1606.08415)."""
    return x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x))) / 2


def softmax(x):
    """Along the last axis; the largest entry is subtracted first, so that exp can't overflow."""
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def layer_norm(x, g, b, eps=1e-5):
    """Each position to mean 0 and variance 1 along its channels, then scaled by g and shifted by b."""
    mean, variance = x.mean(axis=-1, keepdims=True), x.var(axis=-1, keepdims=True)  # 2 of [n_seq, 1]
    return g * (x - mean) / np.sqrt(variance + eps) + b


def linear(x, w, b):
    return x @ w + b  # [n_seq, n_in] @ [n_in, n_out] -> [n_seq, n_out]


def ffn(x, c_fc, c_proj):
    return linear(gelu(linear(x, **c_fc)), **c_proj)  # [n_seq, n_embd] -> [n_seq, 4*n_embd] -> [n_seq, n_embd]


def split_heads(x, n_head):
    """Queries, keys and values of all heads, from the output of c_attn."""
    return x.reshape(len(x), 3, n_head, -1).transpose(1, 2, 0, 3)  # [n_seq, 3*n_embd] -> [3, n_head, n_seq, d_head]


def merge_heads(x):
    n_head, n_seq, d_head = x.shape
    return x.transpose(1, 0, 2).reshape(n_seq, n_head * d_head)  # [n_head, n_seq, d_head] -> [n_seq, n_embd]


def attention(q, k, v, mask):
    """q: [n_head, n_q, d_head], k, v: [n_head, n_k, d_head], mask: [n_q, n_k], -inf where q may not see k -> as q."""
    scores = (q / math.sqrt(q.shape[-1])) @ k.transpose(0, 2, 1) + mask  # [n_head, n_q, n_k]
    return softmax(scores) @ v  # [n_head, n_q, n_k] @ [n_head, n_k, d_head] -> [n_head, n_q, d_head]


def mha(x, c_attn, c_proj, n_head):
    """Multi-head attention, causal: position i looks at positions 0 ... i. x: [n_seq, n_embd] -> the same."""
    q, k, v = split_heads(linear(x, **c_attn), n_head)  # [n_seq, n_embd] -> 3 of [n_head, n_seq, d_head]
    causal_mask = np.triu(np.full((len(x), len(x)), -np.inf, x.dtype), 1)  # [n_seq, n_seq], 0 up to the diagonal
    return linear(merge_heads(attention(q, k, v, causal_mask)), **c_proj)  # [n_head, n_seq, d_head] -> [n_seq, n_embd]


def transformer_block(x, mlp, attn, ln_1, ln_2, n_head):
    x = x + mha(layer_norm(x, **ln_1), **attn, n_head=n_head)  # [n_seq, n_embd] -> [n_seq, n_embd]
    return x + ffn(layer_norm(x, **ln_2), **mlp)  # [n_seq, n_embd] -> [n_seq, n_embd]


def gpt2(inputs, wte, wpe, blocks, ln_f, n_head):
    """Logits of the token after each position. inputs: n_seq <= n_ctx token ids -> [n_seq, n_vocab] float32."""
    x = wte[np.asarray(inputs)] + wpe[: len(inputs)]  # [n_seq] -> [n_seq, n_embd]
    for block in blocks:
        x = transformer_block(x, **block, n_head=n_head)
    return layer_norm(x, **ln_f) @ wte.T  # [n_seq, n_embd] -> [n_seq, n_vocab]


def layers(inputs, wte, wpe, blocks, ln_f, n_head):
    """Yields (name, rows [n_seq, n_embd]) on the way through gpt2: to look inside, or for where a NaN comes from."""
    yield "wte and wpe", (x := wte[np.asarray(inputs)] + wpe[: len(inputs)])
    for i, block in enumerate(blocks):
        yield f"block {i}, attn", (x := x + mha(layer_norm(x, **block["ln_1"]), **block["attn"], n_head=n_head))
        yield f"block {i}, mlp", (x := x + ffn(layer_norm(x, **block["ln_2"]), **block["mlp"]))
    yield "ln_f", layer_norm(x, **ln_f)


def window_start(n_seq, n_ctx):
    """Where the part of the sequence begins that the model sees; it moves half a window at a time."""
    half = max(n_ctx // 2, 1)
    return max(0, math.ceil((n_seq - n_ctx) / half) * half)


def stream(inputs, params, n_head, n_tokens_to_generate, pick=greedy, end_of_text=None):
    """Yields new ids, n_tokens_to_generate or those before end_of_text (an id or a tuple). pick: [n_vocab] -> id."""
    tokens = checked_tokens(inputs, len(params["wte"]))
    for _ in range(n_tokens_to_generate):
        window = tokens[window_start(len(tokens), len(params["wpe"])) :]
        logits = gpt2(window, **params, n_head=n_head)[-1]  # [n_seq] -> [n_seq, n_vocab] -> [n_vocab]
        token = pick(finite(logits, layers(window, **params, n_head=n_head)))
        if is_end(token, end_of_text):
            return
        tokens.append(token)
        yield token


def generate(inputs, params, n_head, n_tokens_to_generate, pick=greedy, end_of_text=None):
    """The list of new token ids; arguments as in stream."""
    return list(stream(inputs, params, n_head, n_tokens_to_generate, pick, end_of_text))


def main(
    prompt: str,
    n_tokens_to_generate: int = 40,
    model_size: str = None,
    models_dir: str = None,
    temperature: float = None,
    top_k: int = None,
    top_p: float = None,
    seed: int = None,
):
    """Continue a prompt with GPT-2, without a cache (gpt2_kvcache.py writes the same text, faster)."""
    from command_line import write_text
    from utils import load_encoder_hparams_and_params

    at_least(0, n_tokens_to_generate=n_tokens_to_generate)
    pick = sampler(temperature, top_k, top_p, seed)
    encoder, hparams, params = load_encoder_hparams_and_params(model_size, models_dir)
    inputs = encoder.encode_prompt(prompt)
    new = stream(inputs, params, hparams["n_head"], n_tokens_to_generate, pick, encoder.end_of_text)
    write_text(new, encoder, n_tokens_to_generate)


if __name__ == "__main__":
    from command_line import run

    run(main)
