"""sampling.py: greedy, temperature, top-k, top-p."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sampling import chooser, distribution, draw, greedy, odds_of, sample, sampler

GOLDEN = Path(__file__).parent / "golden" / "sampling.npz"
LOGITS = np.random.default_rng(5).standard_normal(40, dtype=np.float32)


def test_distributions_equal_transformers():
    with np.load(GOLDEN) as golden:
        logits, all_settings, expected = golden["logits"], golden["settings"], golden["probabilities"]
    for (temperature, top_k, top_p), rows in zip(all_settings.tolist(), expected, strict=True):
        for x, p in zip(logits, rows, strict=True):
            ours = distribution(x, temperature, int(top_k) or None, top_p)
            np.testing.assert_allclose(ours, p, atol=1e-5)
            assert ((ours > 0) == (p > 0)).all()


def passes_chi_square(counts, p):
    """The bound is the 99.9 % quantile of chi-square by the Wilson-Hilferty approximation. counts, p: [n]."""
    n, often = counts.sum(), counts.sum() * p >= 5
    observed, expected = np.append(counts[often], counts[~often].sum()), np.append(p[often], p[~often].sum()) * n
    observed, expected = observed[expected > 0], expected[expected > 0]
    freedom = len(expected) - 1
    bound = freedom * (1 - 2 / (9 * freedom) + 3.09 * np.sqrt(2 / (9 * freedom))) ** 3
    return counts[p == 0].sum() == 0 and ((observed - expected) ** 2 / expected).sum() < bound


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.0},
        {"temperature": 0.6},
        {"temperature": 1.7},
        {"top_k": 8},
        {"top_p": 0.7},
        {"temperature": 1.4, "top_k": 12, "top_p": 0.85},
    ],
)
def test_frequencies_pass_a_chi_square_test(options):
    rng, p = np.random.default_rng(11), distribution(LOGITS, **options)
    counts = np.bincount([sample(LOGITS, rng, **options) for _ in range(20_000)], minlength=len(p))
    assert passes_chi_square(counts, p)


def test_frequencies_of_a_large_vocabulary_pass_a_chi_square_test():
    """Ids of similar probability are counted together, in 50 groups of about the same probability."""
    rng = np.random.default_rng(2)
    logits = rng.standard_normal(50_257, dtype=np.float32) * 3
    p = distribution(logits, temperature=0.9)
    order = np.argsort(-p)
    group = np.empty(len(p), int)
    group[order] = (np.cumsum(p[order]) * 50).clip(0, 49)
    counts = np.bincount([group[sample(logits, rng, temperature=0.9)] for _ in range(3_000)], minlength=50)
    assert passes_chi_square(counts, np.bincount(group, p, minlength=50))


def test_a_tail_of_tiny_probabilities_is_drawn_no_more_often_than_it_should():
    """With float32 exponentials one step in 140 here has a 0 in the tail, which would win: 14 ids instead of 0.2."""
    rng, odds = np.random.default_rng(0), np.full(50_257, 2e-9, np.float32)
    odds[7] = 1
    assert sum(draw(odds, rng) != 7 for _ in range(2_000)) <= 2


def by_the_book(logits, temperature, top_k, top_p):
    """distribution in float64, with a sort of the whole vocabulary."""
    x = (logits.astype(np.float64) - logits.max()) / temperature
    if top_k is not None:
        x[x < np.sort(x)[-min(top_k, len(x))]] = -np.inf
    p = np.exp(x) / np.exp(x).sum()
    order = np.argsort(-p, kind="stable")
    if top_p is not None:
        before = np.append(0, np.cumsum(p[order])[:-1])
        p[order[1:][before[1:] >= top_p - 1e-6]] = 0
    return p / p.sum()


@settings(max_examples=200, deadline=None)
@given(
    st.integers(0, 999),
    st.sampled_from([1, 2, 50, 701, 5_000]),
    st.sampled_from([0.25, 1.0, 4.0]),
    st.sampled_from([None, 1, 3, 40, 600, 10**9]),
    st.sampled_from([None, 0.0, 0.1, 0.5, 0.9, 0.99]),
    st.sampled_from([0.1, 0.5, 2.0]),
)
def test_what_stays_is_what_a_full_sort_keeps(seed, n_vocab, temperature, top_k, top_p, scale):
    """Rounded logits, so that many are equal, and some of them -inf. All temperatures divide exactly."""
    rng = np.random.default_rng(seed)
    logits = np.round(rng.standard_normal(n_vocab, dtype=np.float32) * np.float32(scale) * 8) / 8
    logits[rng.random(n_vocab) < 0.1] = -np.inf
    logits[rng.integers(n_vocab)] = 1
    p, expected = distribution(logits, temperature, top_k, top_p), by_the_book(logits, temperature, top_k, top_p)
    assert ((p > 0) == (expected > 0)).all()
    np.testing.assert_allclose(p, expected, rtol=1e-5, atol=1e-12)


def kept(p, **options):
    return np.flatnonzero(distribution(np.log(np.array(p, np.float32)), **options)).tolist()


def test_a_top_p_that_is_met_exactly_keeps_no_token_too_many():
    assert kept([0.25, 0.5, 0.25], top_p=0.75) == [0, 1]
    assert kept([0.125, 0.5, 0.125, 0.25], top_p=0.5) == [1]
    assert kept([0.3, 0.1, 0.6], top_p=0.9) == [0, 2]
    for k in range(1, 11):
        assert kept([0.1] * 10, top_p=k / 10) == list(range(k))


def test_of_equals_at_the_border_top_k_keeps_all_and_top_p_the_first():
    assert kept([0.2, 0.1, 0.2, 0.3, 0.2], top_k=2) == [0, 2, 3, 4]
    assert kept([0.2, 0.1, 0.2, 0.3, 0.2], top_p=0.6) == [0, 2, 3]
    assert kept([0.2, 0.1999, 0.2001, 0.1999, 0.1999], top_p=0.4) == [0, 2]
    assert kept([0.2, 0.1999, 0.2001, 0.1999, 0.1999], top_p=0.6) == [0, 1, 2]
    assert kept([0.2] * 5, top_k=1) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("pick", [sampler(), sampler(temperature=0, top_p=0.5), lambda x: int(chooser()(x).argmax())])
def test_greedy_takes_the_first_of_equals(pick):
    assert pick(np.array([0, 2, 1, 2, 2], np.float32)) == 1
    assert pick(np.zeros(5, np.float32)) == 0


def test_greedy_is_the_default_and_temperature_zero():
    for pick in (sampler(), sampler(seed=3), sampler(temperature=0), sampler(temperature=0, top_k=5, top_p=0.5)):
        assert pick(LOGITS) == greedy(LOGITS) == LOGITS.argmax()


def test_the_same_seed_draws_the_same_ids_and_another_draws_others():
    draws = [
        [pick(LOGITS) for _ in range(50)] for pick in (sampler(1.0, seed=4), sampler(1.0, seed=4), sampler(1.0, seed=5))
    ]
    assert draws[0] == draws[1] != draws[2]


def test_samplers_do_not_disturb_each_other_or_the_global_state():
    np.random.seed(0)
    state = np.random.get_state()[1].copy()
    alone = sampler(1.0, seed=4)
    expected = [alone(LOGITS) for _ in range(20)]
    one, other = sampler(1.0, seed=4), sampler(1.0, seed=9)
    mixed = []
    for _ in range(20):
        other(LOGITS)
        mixed.append(one(LOGITS))
    assert mixed == expected and (np.random.get_state()[1] == state).all()


@settings(max_examples=200, deadline=None)
@given(
    st.integers(0, 99),
    st.sampled_from([1e-300, 1e-45, 1e-30, 1e-6, 0.5, 1.0, 1e6, 1e30, 1e300]),
    st.sampled_from([None, 1, 3, 60, 10**9]),
    st.sampled_from([None, 0.0, 1e-12, 0.5, 1 - 1e-12, 1.0]),
    st.sampled_from([1e-3, 1.0, 1e4, 1e30]),
)
def test_extreme_settings_give_a_distribution_and_no_warning(seed, temperature, top_k, top_p, scale):
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal(60, dtype=np.float32) * np.float32(scale)
    with np.errstate(divide="raise", invalid="raise", over="raise"):
        p = distribution(logits, temperature, top_k, top_p)
        token = sample(logits, rng, temperature, top_k, top_p)
    assert np.isfinite(p).all() and p.sum() == pytest.approx(1) and p[token] > 0
    assert p.argmax() == logits.argmax() or temperature > 1e5


@pytest.mark.parametrize("options", [{"temperature": 1e-6}, {"top_k": 1}, {"top_p": 0.0}])
def test_these_extremes_are_greedy(options):
    rng = np.random.default_rng(0)
    assert {sample(LOGITS, rng, **options) for _ in range(200)} == {greedy(LOGITS)}


def test_a_huge_temperature_is_uniform():
    np.testing.assert_allclose(distribution(LOGITS, temperature=1e6), 1 / 40, rtol=1e-4)


class Told:
    """A Generator whose exponentials are these."""

    def __init__(self, *numbers):
        self.numbers = numbers

    def standard_exponential(self, n):
        return np.array(self.numbers[:n])


def test_an_id_without_probability_is_never_drawn_however_early_it_would_arrive():
    logits = np.array([-np.inf, 0, 0, -np.inf, -1000], np.float32)
    assert sample(logits, Told(1e-300, 2, 1, 1e-300, 1e-300), temperature=1.0) == 2
    assert sample(logits, Told(1e-300, 2, 3, 1e-300, 1e-300), temperature=1.0) == 1
    assert sample(logits, Told(1, 2, 3, 1e-300, 1e-300), top_k=1, top_p=0.4) == 1


def test_every_id_takes_one_number_a_step_whatever_may_be_drawn():
    states = []
    for options in ({"temperature": 0.1}, {"top_k": 1}, {"top_p": 0.2}, {"temperature": 3.0, "top_k": 9, "top_p": 0.9}):
        rng = np.random.default_rng(8)
        for _ in range(5):
            sample(LOGITS, rng, **options)
        states.append(rng.bit_generator.state)
    rng = np.random.default_rng(8)
    rng.standard_exponential(5 * len(LOGITS))
    assert all(state == rng.bit_generator.state for state in states)


@pytest.mark.parametrize("options", [{"temperature": 1.0}, {"top_k": 40}, {"top_p": 0.95}])
def test_rounding_of_the_logits_does_not_change_what_a_seed_draws(options):
    noise = np.random.default_rng(1)
    one, other = sampler(seed=3, **options), sampler(seed=3, **options)
    for _ in range(2_000):
        logits = noise.standard_normal(600, dtype=np.float32) * 3
        assert one(logits) == other(logits + noise.normal(0, 1e-6, 600).astype(np.float32))


def test_a_token_that_stays_a_candidate_stays_the_choice():
    for seed in range(300):
        token = sampler(1.0, seed=seed)(LOGITS)
        for options in ({"top_k": 10}, {"top_p": 0.6}):
            if distribution(LOGITS, **options)[token]:
                assert sampler(1.0, seed=seed, **options)(LOGITS) == token


def test_types_are_the_same_whatever_is_asked_for():
    for options in ({}, {"temperature": 0.7}, {"top_k": 3}, {"top_p": 0.5}, {"top_k": 99}, {"top_p": 1.0}):
        for logits in (LOGITS, LOGITS.astype(np.float64), LOGITS[:1]):
            p = chooser(**options)(logits)
            assert p.dtype == np.float64 and p.shape == logits.shape and p.sum() == pytest.approx(1, abs=1e-12)
            assert type(sampler(seed=1, **options)(logits)) is int
    assert odds_of(LOGITS, 0.7, 3, 0.5).dtype == np.float32


def test_a_vocabulary_of_one_entry_has_one_choice():
    for options in ({}, {"temperature": 1e-9}, {"top_k": 5}, {"top_p": 0.0}, {"temperature": 2.0, "top_p": 0.9}):
        assert sampler(seed=1, **options)(np.array([-3], np.float32)) == 0


def test_logits_are_not_changed():
    kept = LOGITS.copy()
    sample(LOGITS, np.random.default_rng(0), 0.5, 7, 0.5)
    assert (kept == LOGITS).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": float("nan")}, "temperature .* nan"),
        ({"temperature": -1.0}, "temperature .* -1"),
        ({"temperature": float("inf")}, "temperature .* inf"),
        ({"top_p": 1.1}, "top_p .* 1.1"),
        ({"top_p": -0.1}, "top_p .* -0.1"),
        ({"top_p": float("nan")}, "top_p .* nan"),
        ({"top_k": 0}, "top_k .* 0"),
        ({"top_k": -3}, "top_k .* -3"),
        ({"seed": -1}, "seed .* -1"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        sampler(**options)
    if "seed" not in options:
        with pytest.raises(ValueError, match=message):
            chooser(**options)
        with pytest.raises(ValueError, match=message):
            sample(LOGITS, np.random.default_rng(0), **options)
