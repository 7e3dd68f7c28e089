"""gpt2.py under JAX: its source with one line changed, nothing else."""

import types
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree
from tiny import arrays, random_params, random_tokens

import gpt2

NUMPY, JAX = "import numpy as np\n", "import jax.numpy as np\n"
N_HEAD = 2


@pytest.fixture(scope="module")
def gpt2_jax():
    source = (Path(__file__).parent.parent / "gpt2.py").read_text()
    assert source.count(NUMPY) == 1
    module = types.ModuleType("gpt2_jax")
    exec(compile(source.replace(NUMPY, JAX), "gpt2_jax.py", "exec"), module.__dict__)
    return module


@pytest.fixture(scope="module")
def params():
    return random_params(n_vocab=11, n_ctx=6, n_embd=4, n_layer=2)


@pytest.fixture
def float64():
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


def test_logits_under_jit_equal_numpys(gpt2_jax):
    params, tokens = random_params(), random_tokens(16)
    forward = jax.jit(partial(gpt2_jax.gpt2, n_head=3))
    expected = gpt2.gpt2(tokens, **params, n_head=3)
    got = forward(jax.numpy.array(tokens), **params)
    assert got.dtype == np.float32
    assert np.abs(got - expected).max() < 1e-4
    assert np.abs(expected).max() > 1


def test_gradients_of_all_weights_equal_central_differences(gpt2_jax, params, float64):
    tokens = random_tokens(7, 11, seed=1)
    inputs, targets = jax.numpy.array(tokens[:-1]), np.array(tokens[1:])

    def loss(params):
        """Mean cross-entropy of the next token."""
        log_p = jax.nn.log_softmax(gpt2_jax.gpt2(inputs, **params, n_head=N_HEAD))  # [n_seq, n_vocab]
        return -log_p[np.arange(len(targets)), targets].mean()

    gradients = jax.jit(jax.grad(loss))(jax.tree.map(lambda weight: np.asarray(weight, np.float64), params))
    assert jax.tree.map(np.shape, gradients) == jax.tree.map(np.shape, params)
    gradient, restore = ravel_pytree(gradients)  # [n_weights]
    weights, step = np.asarray(ravel_pytree(params)[0], np.float64), 1e-5
    losses = jax.jit(jax.vmap(lambda weights: loss(restore(weights))))  # [n, n_weights] -> [n]
    moves = step * np.eye(len(weights))
    measured = (losses(weights + moves) - losses(weights - moves)) / (2 * step)
    assert np.abs(gradient - measured).max() < 1e-8
    assert np.mean(np.abs(gradient) > 1e-5) > 0.8


def test_numpy_itself_sees_no_weight_changed(params):
    before = [a.copy() for a in arrays(params)]
    gpt2.gpt2(random_tokens(6, 11), **params, n_head=N_HEAD)
    assert all(np.array_equal(a, b) for a, b in zip(arrays(params), before, strict=True))
