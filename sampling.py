"""From logits to a token id: greedy, or drawn after temperature, top-k and top-p (in this order)."""

import math
import operator

import numpy as np


def greedy(logits):
    """logits: [n_vocab] -> the id of the largest; the first one of equals."""
    return int(logits.argmax())


def scaled(logits, temperature):
    """Divided by the temperature, the largest moved to 0 first, so that no temperature above 0 overflows it."""
    logits = logits - logits.max()  # [n_vocab]
    with np.errstate(
        over="ignore"
    ):  # a tiny temperature sends all but the largest to -inf: probability 0, as it should
        return logits / np.float32(max(temperature, np.finfo(np.float32).tiny))


def keep_top_k(logits, top_k):
    """All but the top_k largest become -inf; what equals the smallest kept stays too (Fan et al. 2018)."""
    if top_k >= len(logits):
        return logits
    threshold = np.partition(logits, -top_k)[-top_k]
    return np.where(logits < threshold, np.float32(-np.inf), logits)


def keep_top_p(logits, top_p):
    """The fewest most probable ids whose probabilities reach top_p stay, at least one; the rest become -inf.

    Nucleus sampling (Holtzman et al., arXiv 1904.09751).
    """
    if top_p >= 1:
        return logits
    order = np.argsort(-logits, kind="stable")  # [n_vocab], most probable first
    p = probabilities(logits[order])
    reached_before = np.cumsum(p) - p  # [n_vocab], the sum of all that come before
    drop = reached_before >= top_p
    drop[0] = False
    kept = logits.copy()
    kept[order[drop]] = -np.inf
    return kept


def probabilities(logits):
    """[n_vocab] -> [n_vocab] float64: sums over 50,257 entries decide here, and nothing after them is float32 work."""
    e = np.exp(logits.astype(np.float64) - logits.max())
    return e / e.sum()


def distribution(logits, temperature=1.0, top_k=None, top_p=None):
    """The probabilities that a token is drawn from. logits: [n_vocab] -> [n_vocab] float64, sum 1."""
    logits = scaled(logits, temperature)
    if top_k is not None:
        logits = keep_top_k(logits, top_k)
    if top_p is not None:
        logits = keep_top_p(logits, top_p)
    return probabilities(logits)


def draw(p, rng):
    """An id with probability p[id], from one uniform number of rng, a numpy.random.Generator. p: [n_vocab], sum 1."""
    cumulative = np.cumsum(p)  # [n_vocab]
    just_below = np.nextafter(cumulative[-1], 0)  # so that rounding never reaches past the last id
    return int(np.searchsorted(cumulative, rng.random() * just_below, side="right"))


def at_least(least, **numbers):
    """ValueError, naming it and its value, for the first number that is smaller; None stands for no number."""
    for name, number in numbers.items():
        if number is not None and number < least:
            raise ValueError(f"{name} must be {least} or more, not {number}")


def check_settings(temperature=None, top_k=None, top_p=None, seed=None):
    """ValueError, naming the setting and its value, for one that can't be meant."""
    if temperature is not None and not 0 <= temperature < math.inf:
        raise ValueError(f"temperature must be a number from 0 up, not {temperature}")
    if top_p is not None and not 0 <= top_p <= 1:
        raise ValueError(f"top_p must lie between 0 and 1, not {top_p}")
    at_least(1, top_k=top_k)
    at_least(0, seed=seed)


def chooser(temperature=None, top_k=None, top_p=None):
    """A function logits -> probabilities for these settings, both [n_vocab].

    Greedy, all on the largest, if the temperature is 0 or nothing is given; else the temperature is 1 unless told.
    """
    check_settings(temperature, top_k, top_p)
    if temperature == 0 or (temperature is None and top_k is None and top_p is None):
        return lambda logits: (np.arange(len(logits)) == greedy(logits)).astype(np.float64)
    temperature = 1.0 if temperature is None else temperature
    return lambda logits: distribution(logits, temperature, top_k, top_p)


def sample(logits, rng, temperature=None, top_k=None, top_p=None):
    """logits: [n_vocab] -> an id drawn from the distribution that these settings make of them."""
    return draw(chooser(temperature, top_k, top_p)(logits), rng)


def sampler(temperature=None, top_k=None, top_p=None, seed=None):
    """A function logits -> id that draws from a Generator of its own, which starts from seed (None: from entropy).

    The Generator is the one thing in this project that makes the same call give different results.
    """
    check_settings(temperature, top_k, top_p, seed)
    to_probabilities, rng = chooser(temperature, top_k, top_p), np.random.default_rng(seed)
    return lambda logits: draw(to_probabilities(logits), rng)


def checked_tokens(tokens, n_vocab):
    """Ids, a list or an integer array, as a list of int; ValueError for none, and for one outside the vocabulary."""
    if len(tokens) == 0:
        raise ValueError("there are no tokens: an empty text begins with <|endoftext|>")
    tokens = [operator.index(token) for token in tokens]
    for token in tokens:
        if not 0 <= token < n_vocab:  # NumPy would take -1 for the last one
            raise ValueError(f"token id {token} is outside the vocabulary of {n_vocab}")
    return tokens


def finite(logits, layers):
    """The logits; FloatingPointError, naming where it begins, if they aren't all numbers. layers: see gpt2.layers."""
    if not math.isfinite(logits.max() - logits.min()):
        where = next((name for name, rows in layers if not np.isfinite(rows).all()), "the product with wte")
        raise FloatingPointError(f"the model computes NaN or infinity, first in {where}; did its training diverge?")
    return logits


def is_end(token, end_of_text):
    """Whether a text ends at this token. end_of_text: an id, a tuple of ids, or None for a text without an end."""
    return token in end_of_text if isinstance(end_of_text, tuple) else token == end_of_text
