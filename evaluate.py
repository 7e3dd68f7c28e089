"""How well a model knows a text: bits per byte, and perplexity per token."""

import itertools
import math
import re

import numpy as np

from command_line import read_input, with_bar
from encoder import END_OF_TEXT
from gpt2 import layers
from gpt2_kvcache import gpt2
from sampling import finite
from utils import load_encoder_hparams_and_params

PIECE = 256  # tokens whose logits are in memory at once


def token_losses(logits, targets):
    """-ln p(target) of each row. logits: [n, n_vocab] float32, targets: [n] ids -> [n] float64 nats."""
    highest = logits.max(axis=-1)  # [n, n_vocab] -> [n]
    total = np.exp(logits - highest[:, None]).sum(axis=-1)  # [n, n_vocab] -> [n]
    chosen = logits[np.arange(len(targets)), targets]  # [n, n_vocab] -> [n]
    return (highest - chosen).astype(np.float64) + np.log(total.astype(np.float64))


def text_losses(tokens, params, n_head):
    """Yields the losses, in nats, of tokens[1:], each predicted once, some at a time.

    Windows of n_ctx tokens overlap by half: past the first window every token has at least n_ctx // 2 of context.
    """
    n_ctx = len(params["wpe"])
    n_done = 1  # the first token is only context
    while n_done < len(tokens):
        start = max(0, n_done - max(n_ctx // 2, 1))
        window, kvcache = tokens[start : start + n_ctx + 1], None
        end = n_done - 1 - start  # how many of the window's tokens have had their next token predicted
        if end:
            _, kvcache = gpt2(window[:end], **params, n_head=n_head, n_logits=0)
        while end < len(window) - 1:
            n_past, end = end, min(end + PIECE, len(window) - 1)
            logits, kvcache = gpt2(window[:end], **params, n_head=n_head, kvcache=kvcache)  # [end - n_past, n_vocab]
            finite(logits, layers(window[:end], **params, n_head=n_head))
            yield token_losses(logits, window[n_past + 1 : end + 1])
        n_done = start + len(window)


def perplexity(loss):
    """e^loss in writing; a float ends at e^709."""
    return f"{math.exp(loss):.2f}" if loss < 700 else f"10^{loss / math.log(10):.0f}"


def main(file: str, model_size: str = None, models_dir: str = None):
    """Print how many bits a model needs for each byte of a text file, and its perplexity per token.

    Documents in the file may be separated by lines <|endoftext|>. Of several, each has it as its last token to predict,
    one alone hasn't; it never counts as bytes.
    """
    documents = [text for text in re.split(rf"\n?^{re.escape(END_OF_TEXT)}$\n?", read_input(file), flags=re.M) if text]
    n_bytes = sum(len(text.encode()) for text in documents)
    if n_bytes == 0:
        raise ValueError(f"{file} holds no text")
    encoder, hparams, params = load_encoder_hparams_and_params(model_size, models_dir)
    first, *_ = encoder.encode_prompt("")
    tokens = [first]
    for text in documents:
        tokens += [*encoder.encode(text), first]
    if len(documents) == 1:  # a text alone has no separator that would be its last token
        tokens.pop()
    n = len(tokens) - 1
    losses = itertools.chain.from_iterable(text_losses(tokens, params, hparams["n_head"]))
    nats = math.fsum(with_bar(losses, n, "token"))
    print(f"{nats / math.log(2) / n_bytes:.4f} bits per byte, perplexity {perplexity(nats / n)} per token")
    print(f"({n} tokens, {n_bytes} bytes, documents: {len(documents)})")


if __name__ == "__main__":
    from command_line import run

    run(main)
