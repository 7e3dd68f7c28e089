"""Every section of bench.py on a tiny model; what its rows say is checked for sense, not for speed."""

import json
import math
import re
import sys
import types
from pathlib import Path

import numpy as np
import pytest
from tiny import random_params, random_tokens

import bench
import speculative
from export import by_their_names
from utils import load_encoder_hparams_and_params

GOLDEN = Path(__file__).parent / "golden" / "huggingface"
N_CTX, N_HEAD = 64, 3


class Letters:
    """Stands in for an encoder."""

    def encode(self, text):
        return [ord(letter) % 50 for letter in text]


@pytest.fixture
def setup():
    params = random_params(n_ctx=N_CTX)
    return bench.Setup(Letters(), params, N_HEAD, random_tokens(N_CTX), n_rounds=1, n_tokens=None, model=[])


def measured(section, setup):
    """[(the row as it is printed, its numbers)]; every number is finite and, but where noted, above 0."""
    rows = [(f"{label:52}{text.format(**numbers)}", numbers) for label, text, numbers in section(setup)]
    for line, numbers in rows:
        assert re.match(r".{51} \S", line), line  # the label leaves room for what stands beside it
        for name, value in numbers.items():
            if isinstance(value, int | float):
                assert math.isfinite(value) and (value > 0 or name in ("difference", "held", "guessed")), line
    return rows


def test_cached_logits_are_those_of_no_cache_and_texts_are_identical(setup):
    *differences, texts = measured(bench.correctness, setup)
    assert len(differences) == 3 and all(numbers["difference"] < 1e-4 for _, numbers in differences)
    assert texts[1] == {"texts": "identical"}


def test_a_wrong_cache_is_seen(setup, monkeypatch):
    right = bench.gpt2_kvcache.gpt2

    def wrong(inputs, *args, **kwargs):
        logits, kvcache = right(inputs, *args, **kwargs)
        return logits + (len(inputs) > N_CTX // 2), kvcache

    monkeypatch.setattr(bench.gpt2_kvcache, "gpt2", wrong)
    monkeypatch.setattr(bench.gpt2_kvcache, "generate", lambda *args: [0])
    *differences, texts = measured(bench.correctness, setup)
    assert all(0.9 < numbers["difference"] < 1.1 for _, numbers in differences)
    assert texts[0].endswith("DIFFERENT")


def test_decode_is_timed_near_far_and_at_the_end_over_the_roof(setup):
    roof, *steps, last_over_first = measured(bench.decode, setup)
    assert [numbers["n"] for _, numbers in steps] == [10, 56, 40]
    assert "ms" in roof[1] and "ratio" in last_over_first[1]
    assert bench.places(1024) == [10, 300, 900, 1000]


def test_prompts_are_timed_beside_bare_products_and_in_pieces(setup):
    rows = measured(bench.prompts, setup)
    assert [numbers.get("n") for _, numbers in rows[:2]] == [64, 64]
    assert [numbers["size"] for _, numbers in rows[2:]] == [8, 16, 32, 64]
    assert list(bench.prompts_of(setup._replace(tokens=[0] * 1024))) == [64, 512]


def test_bare_products_take_every_weight_matrix(setup):
    """Counted by arrays that note each product."""

    class Noting(np.ndarray):
        def __rmatmul__(self, other):
            multiplied.append(self.shape)
            return np.asarray(other) @ np.asarray(self)

    multiplied, params = [], setup.params
    noted = [
        {part: {k: {"w": v["w"].view(Noting)} for k, v in block[part].items()} for part in ("attn", "mlp")}
        for block in params["blocks"]
    ]
    bench.bare_products({"blocks": noted, "wte": params["wte"].view(Noting)}, 5)()
    assert sum(math.prod(shape) for shape in multiplied) == speculative.n_weights(params)


@pytest.mark.parametrize(("n_tokens", "n"), [(None, 59), (9, 9)])
def test_a_text_is_timed_with_the_cache_and_without(setup, n_tokens, n):
    rows = measured(bench.speedup, setup._replace(n_tokens=n_tokens))
    assert [numbers["n"] for _, numbers in rows] == [n, n]


def test_choosing_a_token_is_timed_in_four_ways(setup):
    rows = measured(bench.sampling, setup)
    assert [numbers.get("top_k", numbers.get("top_p")) for _, numbers in rows] == [None, None, 40, 0.95]
    assert (rows[0][1]["step"], rows[0][1]["step_of_16"]) == (1, 1)  # greedy, over itself


@pytest.mark.parametrize(("n_tokens", "n"), [(None, 16), (3, 3)])
def test_batches_are_timed_beside_one_text(setup, n_tokens, n):
    plain, *rows = measured(bench.batches, setup._replace(n_tokens=n_tokens))
    assert [numbers["size"] for _, numbers in rows] == [1, 8, 16]
    assert rows[0][1]["gain"] == 1 and {numbers["n"] for _, numbers in (plain, *rows)} == {n}


def test_the_table_of_passes_can_be_copied_from_the_output(setup):
    rows = measured(bench.passes, setup)
    assert [numbers["n"] for _, numbers in rows[:-1]] == list(speculative.COST_TOKENS[1:])
    printed = tuple(map(float, re.search(r"\((.*)\)", rows[-1][0])[1].split(",")))
    assert printed == rows[-1][1]["costs"] == (1.0, *(numbers["cost"] for _, numbers in rows[:-1]))


def test_guessing_pays_off_where_the_text_repeats(setup):
    repeating, random, draft = (numbers for _, numbers in measured(bench.guessing, setup))
    assert 0 < repeating["held"] <= repeating["guessed"] and random["held"] <= random["guessed"]
    assert draft["held"] <= draft["guessed"]


def test_start_and_memory_of_the_bundled_model():
    encoder, hparams, params = load_encoder_hparams_and_params("fairytale")
    setup = bench.Setup(encoder, params, hparams["n_head"], [], 1, None, ["--model_size", "fairytale"])
    start, memory, cache = (numbers for _, numbers in measured(bench.startup, setup))
    assert start["times"] > 1 and 10 < memory["mb"] < 500 and memory["times"] > 1
    assert cache == {"bytes": 5120}


def test_the_next_token_is_timed_at_growing_positions(setup):
    n = [numbers["n"] for _, numbers in measured(bench.by_position, setup)]
    assert n == [4, 8, 16, 24, 32, 40, 48, 56, 63]


@pytest.mark.parametrize("section", [one for one in bench.SECTIONS if one not in (bench.startup, bench.sampling)])
def test_the_smallest_windows_are_measured_too(section):
    params = random_params(n_ctx=16)
    assert measured(section, bench.Setup(Letters(), params, N_HEAD, random_tokens(16), 1, None, []))


# Beside transformers: what PyTorch isn't needed for


@pytest.mark.parametrize("name", ["sharded", "bf16", "settings"])
def test_transformers_is_given_its_own_configuration_and_names(name):
    """As it wrote them itself: config.json, and the names of the tensors in the files."""
    _, hparams, params = load_encoder_hparams_and_params(name, GOLDEN)
    config = json.loads((GOLDEN / name / "config.json").read_text())
    ours = bench.transformers_config(params, hparams["n_head"])
    assert len(ours) >= 8
    for key, value in ours.items() - {("bos_token_id", 0), ("eos_token_id", 0)}:
        wanted = config.get(key) or {"n_inner": 4 * config["n_embd"]}[key]
        assert value == pytest.approx(wanted, rel=1e-6), key
    assert ours.get("layer_norm_epsilon", 1e-5) == pytest.approx(config["layer_norm_epsilon"])
    names = set()
    for path in (GOLDEN / name).glob("*.safetensors"):
        content = path.read_bytes()
        names |= json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")]).keys() - {"__metadata__"}
    assert {name for name, _ in by_their_names(params)} == {name.removeprefix("transformer.") for name in names}


def test_transformers_runs_beside(setup, monkeypatch):
    """With modules in the place of PyTorch and transformers, which hold as much as the section uses."""

    class Cache:
        def crop(self, n):
            assert n == -1

    class NoGrad:
        __enter__ = __exit__ = lambda *args: None

    def model(ids, **options):
        calls.append(len(ids[0]))
        return types.SimpleNamespace(past_key_values=Cache())

    calls = []
    torch = types.SimpleNamespace(tensor=np.array, no_grad=NoGrad, get_num_threads=lambda: 2, __version__="2.0")
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "transformers", types.SimpleNamespace(DynamicCache=Cache))
    monkeypatch.setattr(bench, "torch_model", lambda params, n_head: model)
    rows = measured(bench.beside_transformers, setup)
    labels = [line.partition(":")[0] for line, _ in rows[:-1]]
    assert labels == ["decode at 10", "decode at 56", "decode at 40", "prefill 64"]
    assert set(calls) == {1, 10, 56, 40, 64}


# The command


def test_the_kernel_is_told_where_threadpoolctl_is_installed(monkeypatch):
    info = [{"user_api": "blas", "internal_api": "openblas", "architecture": "Haswell"}, {"user_api": "openmp"}]
    monkeypatch.setitem(sys.modules, "threadpoolctl", types.SimpleNamespace(threadpool_info=lambda: info))
    monkeypatch.setattr(bench, "find_spec", lambda name: name)
    assert bench.blas() == "openblas Haswell" and bench.machine().endswith(", openblas Haswell")
    info.clear()
    assert "blas" in bench.blas()
    monkeypatch.setattr(bench, "find_spec", lambda name: None)
    assert bench.blas().endswith("pip install threadpoolctl)")


def test_a_failure_late_in_a_run_loses_nothing(monkeypatch, tmp_path, capsys):
    def first(setup):
        yield "one", "{ms:.1f} ms", {"ms": 1.25}

    def second(setup):
        yield "    two", "{n}", {"n": 2}
        raise OSError("the disk is gone")

    monkeypatch.setattr(bench, "SECTIONS", (first, second, bench.decode))
    with pytest.raises(OSError, match="the disk is gone"):
        bench.main(rounds=3, json=str(tmp_path / "known.json"))
    header, *rows = capsys.readouterr().out.splitlines()
    assert re.fullmatch("model fairytale; .* cores, Python .*; medians of 3 rounds or more, 3 by position", header)
    assert rows == ["one".ljust(52) + "1.2 ms", "    two".ljust(52) + "2"]
    known = json.loads((tmp_path / "known.json").read_text())
    assert (known["model"], known["rounds"]) == ("fairytale", 3)
    assert known["first"] == [{"row": "one", "ms": 1.25}] and known["second"] == [{"row": "two", "n": 2}]


def test_rows_are_printed_as_they_are_known(monkeypatch, capsys):
    def section(setup):
        yield "one", "{n}", {"n": 1}
        seen.append(capsys.readouterr().out)
        yield "two", "{n}", {"n": 2}

    seen = []
    monkeypatch.setattr(bench, "SECTIONS", (section,))
    bench.main(rounds=1)
    assert re.search("^one +1$", seen[0], re.MULTILINE)


def test_the_chart_shows_both_curves_and_the_roof(monkeypatch, tmp_path):
    """With a module in the place of matplotlib that notes what is drawn."""

    class Figure:
        def __init__(self, **options):
            pass

        def subplots(self):
            return self

        def savefig(self, path, **options):
            Path(path).write_text("chart")

        def __getattr__(self, name):
            return lambda *args, **options: drawn.append((name, *args))

    def decode(setup):
        yield "the roof", "", {"ms": 0.5}

    def by_position(setup):
        yield "after 4", "", {"n": 4, "ms": 2, "ms_plain": 8}
        yield "after 16", "", {"n": 16, "ms": 3, "ms_plain": 32}

    drawn = []
    monkeypatch.setitem(sys.modules, "matplotlib", types.ModuleType("matplotlib"))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", types.SimpleNamespace(Figure=Figure))
    monkeypatch.setattr(bench, "find_spec", lambda name: name if name == "matplotlib" else None)
    monkeypatch.setattr(bench, "by_position", by_position)
    monkeypatch.setattr(bench, "SECTIONS", (decode, by_position))
    bench.main(rounds=1, plot=str(tmp_path / "chart.png"))
    assert drawn[:3] == [("plot", [4, 16], [8, 32], "o-"), ("plot", [4, 16], [2, 3], "s-"), ("axhline", 0.5)]
    assert (tmp_path / "chart.png").exists()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"rounds": 0}, ValueError, "rounds must be 1 or more, not 0"),
        ({"n_tokens": 0}, ValueError, "n_tokens must be 1 or more, not 0"),
        ({"json": "nowhere/known.json"}, ValueError, "no folder for nowhere/known.json"),
        ({"plot": "chart.png"}, OSError, "--plot needs more packages: pip install matplotlib"),
        ({"torch": True}, OSError, "--torch needs more packages: pip install torch transformers"),
    ],
)
def test_what_cannot_be_measured_is_said_before_anything_is_loaded(options, error, message, monkeypatch):
    monkeypatch.setattr(bench, "find_spec", lambda name: None)
    monkeypatch.setattr(bench, "load_encoder_hparams_and_params", None)
    with pytest.raises(error, match=message):
        bench.main(**options)
