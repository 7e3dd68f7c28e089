"""sampling.py: greedy, temperature, top-k, top-p."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sampling import distribution, greedy, sample, sampler

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
    """20,000 draws. The bound is the 99.9 % quantile of chi-square by the Wilson-Hilferty approximation."""
    rng, n, p = np.random.default_rng(11), 20_000, distribution(LOGITS, **options)
    counts = np.bincount([sample(LOGITS, rng, **options) for _ in range(n)], minlength=len(p))
    assert counts[p == 0].sum() == 0
    often = n * p >= 5
    observed, expected = np.append(counts[often], counts[~often].sum()), np.append(p[often], p[~often].sum()) * n
    observed, expected = observed[expected > 0], expected[expected > 0]
    freedom = len(expected) - 1
    bound = freedom * (1 - 2 / (9 * freedom) + 3.09 * np.sqrt(2 / (9 * freedom))) ** 3
    assert ((observed - expected) ** 2 / expected).sum() < bound


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
    st.sampled_from([1e-45, 1e-30, 1e-6, 0.5, 1.0, 1e6, 1e30]),
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


def test_no_draw_ever_falls_behind_the_last_id():
    class Highest:
        def random(self):
            return np.nextafter(1.0, 0)

    assert sample(np.array([0, 0, -np.inf], np.float32), Highest(), temperature=1.0) == 1


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
