"""From logits to a token id: greedy, or drawn after temperature, top-k and top-p (in this order)."""

import functools
import math
import operator

import numpy as np

SMALLEST, LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
SLACK = 1e-6  # what float32 logits leave uncertain in a sum of probabilities


def greedy(logits):
    """logits: [n_vocab] -> the id of the largest; the first one of equals."""
    return int(logits.argmax())


def scaled(logits, temperature):
    """Divided by the temperature, the largest moved to 0 first. logits: [n_vocab] -> [n_vocab] float32."""
    temperature = np.float32(min(max(temperature, SMALLEST), LARGEST))
    with np.errstate(over="ignore"):  # a tiny temperature sends all but the largest to -inf, as it should
        return np.subtract(logits, logits.max(), dtype=np.float32) / temperature


def kth_largest(logits, k):
    """logits: [n_vocab] -> the k-th largest. That of the columns' largest is a floor for it, which few reach."""
    n_columns = min(8 * k, len(logits))
    table = logits[: len(logits) // n_columns * n_columns].reshape(-1, n_columns)  # [n_vocab] -> [n_rows, n_columns]
    floor = np.partition(table.max(axis=0), -k)[-k]
    return np.partition(logits[logits >= floor], -k)[-k]


def keep_top_p(odds, top_p):
    """The fewest most probable ids whose probabilities reach top_p stay, at least one; the rest become 0.

    Nucleus sampling (Holtzman et al., arXiv 1904.09751); of equals the first stay. odds: [n_vocab] float32. They are
    summed up in bins a percent wide, and only the bin that reaches top_p is sorted.
    """
    if top_p >= 1:
        return odds
    total = float(odds.sum(dtype=np.float64))
    enough = (top_p - SLACK) * total
    likely = odds.compress(odds >= total * (1 - top_p) / len(odds))  # [n_likely]; all others together: below 1 - top_p
    bins = likely.max().view(np.int32) - likely.view(np.int32)  # [n_likely]; floats above 0 are ordered as their bits
    bins >>= 17  # 64 bins from the largest to its half, 64 to its quarter, ...
    reached = np.bincount(bins.astype(np.intp), likely).cumsum()  # [n_bins]
    last = reached.searchsorted(enough)
    border = np.sort(likely[bins == last])[::-1]  # [n_border]
    reached = border.cumsum(dtype=np.float64) + (reached[last - 1] if last else 0)  # [n_border]
    border = border[: reached.searchsorted(enough) + 1]
    kept = odds * (odds >= border[-1])  # [n_vocab]
    kept[np.flatnonzero(odds == border[-1])[np.count_nonzero(border == border[-1]) :]] = 0
    return kept


def is_greedy(temperature, top_k, top_p):
    """Temperature 0 is greedy, and so is nothing at all."""
    return temperature == 0 or (temperature is None and top_k is None and top_p is None)


def odds_of(logits, temperature=None, top_k=None, top_p=None):
    """Probabilities up to a factor, 1 for the most probable id. [n_vocab] -> [n_vocab] float32.

    Of top_k, what equals the smallest kept stays too (Fan et al. 2018).
    """
    logits = scaled(logits, 1.0 if temperature is None else temperature)
    odds = np.exp(logits)
    if top_k is not None and top_k < len(logits):
        odds *= logits >= kth_largest(logits, top_k)
    return odds if top_p is None else keep_top_p(odds, top_p)


def distribution(logits, temperature=None, top_k=None, top_p=None):
    """The probabilities that `sample` draws from. [n_vocab] -> [n_vocab] float64, sum 1."""
    if is_greedy(temperature, top_k, top_p):
        return (np.arange(len(logits)) == greedy(logits)).astype(np.float64)
    odds = odds_of(logits, temperature, top_k, top_p)
    return odds / odds.sum(dtype=np.float64)


def draw(odds, rng):
    """An id in proportion to its odds (or its probability), by rng, a numpy.random.Generator. odds: [n_vocab].

    A race: every id arrives after an exponentially distributed time, the sooner the better its odds, and the first one
    wins (torch.multinomial does the same; in logarithms it is the Gumbel-max trick). Every id has its own number at
    each step of a seed, so rounding, or another set of candidates, changes the winner only in a dead heat.
    """
    numbers = rng.standard_exponential(len(odds))  # [n_vocab] float64: of float32 ones, one in 8 million is 0, and wins
    return int(np.divide(odds, numbers, out=numbers).argmax())


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
    """`distribution` with these settings: a function logits -> probabilities, both [n_vocab]."""
    check_settings(temperature, top_k, top_p)
    return functools.partial(distribution, temperature=temperature, top_k=top_k, top_p=top_p)


def sample(logits, rng, temperature=None, top_k=None, top_p=None):
    """logits: [n_vocab] -> a token id.

    Greedy if the temperature is 0 or nothing is given; else the temperature is 1 unless told.
    """
    check_settings(temperature, top_k, top_p)
    if is_greedy(temperature, top_k, top_p):
        return greedy(logits)
    return draw(odds_of(logits, temperature, top_k, top_p), rng)


def sampler(temperature=None, top_k=None, top_p=None, seed=None):
    """`sample` with these settings and a Generator of its own, which starts from seed (None: from entropy).

    The Generator is the one thing in this project that makes the same call give different results.
    """
    check_settings(temperature, top_k, top_p, seed)
    rng = np.random.default_rng(seed)
    return functools.partial(sample, rng=rng, temperature=temperature, top_k=top_k, top_p=top_p)


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
