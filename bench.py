"""Is the cache right, and how fast is it? One command checks and times a model and prints what it found.

Every comparison alternates between its sides in one run and takes the median of the rounds' ratios, so that other work
on the machine disturbs all alike. The roof is the time of the bare products of one row with every weight matrix: a
decode step can't be faster than reading the weights.

SECTIONS lists what is measured. A section takes a Setup and yields its rows as they are known: a label, a format string
for what stands beside it, and the numbers for that string, which --json keeps.
"""

import os
import platform
import re
import subprocess
import sys
import time
from functools import partial
from importlib.util import find_spec
from json import dumps
from pathlib import Path
from typing import NamedTuple

import numpy as np

import batch
import gpt2
import gpt2_kvcache
import speculative
from encoder import Encoder
from export import by_their_names
from sampling import at_least, chooser, sampler
from utils import load_encoder_hparams_and_params

SETTINGS = {"greedy": {}, "temperature": {"temperature": 0.8}, "top_k": {"top_k": 40}, "top_p": {"top_p": 0.95}}


class Setup(NamedTuple):
    """What the sections measure, and how often."""

    encoder: Encoder
    params: dict
    n_head: int
    tokens: list  # n_ctx random ids
    n_rounds: int
    n_tokens: int | None  # how long the texts of speedup and batches are; None: as fits the window
    model: list  # the arguments of a command line that name the model


def alternate(functions, n_rounds):
    """Runs the functions of a dict in turn, once to warm up and n_rounds times. -> {key: seconds [n_rounds]}."""
    for function in functions.values():
        function()
    seconds = {key: np.zeros(n_rounds) for key in functions}
    for i in range(n_rounds):
        for key, function in functions.items():
            start = time.perf_counter()
            function()
            seconds[key][i] = time.perf_counter() - start
    return seconds


def ms(seconds):
    return float(np.median(seconds)) * 1e3


def ratio(seconds, other):
    return float(np.median(seconds / other))


def bare_products(params, n_rows):
    """A function that multiplies n_rows rows with every weight matrix (one row with wte, as a prompt does)."""
    rng, n_embd = np.random.default_rng(0), params["wte"].shape[1]
    parts = [block[part] for block in params["blocks"] for part in ("attn", "mlp")]
    matrices = [layer["w"] for part in parts for layer in part.values()]
    rows = {n: rng.standard_normal((n_rows, n), dtype=np.float32) for n in {len(w) for w in matrices}}

    def products():
        for w in matrices:
            rows[len(w)] @ w
        rows[n_embd][:1] @ params["wte"].T

    return products


def step_at(s, n_past, n_new=1):
    """A function that runs n_new tokens after n_past cached ones."""
    _, kvcache = gpt2_kvcache.prefill(s.tokens[:n_past], s.params, s.n_head)
    return partial(gpt2_kvcache.gpt2, s.tokens[: n_past + n_new], **s.params, n_head=s.n_head, kvcache=kvcache)


def prompts_of(s):
    """{n: a function that runs a prompt of n tokens}, for 64 and 512 or what the window holds of them."""
    sizes = sorted({min(n, len(s.tokens)) for n in (64, 512)})
    return {n: partial(gpt2_kvcache.prefill, s.tokens[:n], s.params, s.n_head) for n in sizes}


def places(n_ctx):
    """The numbers of cached tokens at which steps are timed: few, 300, far into the window, close to its end."""
    end = n_ctx - 24 if n_ctx > 48 else n_ctx - 1
    return [min(10, n_ctx // 2), *([300] if n_ctx > 350 else []), n_ctx * 900 // 1024, end]


def correctness(s):
    """The largest logit difference to no cache over a window, run in three ways; whether texts are the same."""
    expected = gpt2.gpt2(s.tokens, **s.params, n_head=s.n_head)  # [n_ctx, n_vocab]
    for name, size in (("one token at a time", 1), ("in chunks of 7", 7), ("in one piece", len(s.tokens))):
        kvcache, difference = None, 0.0
        for end in [*range(size, len(s.tokens), size), len(s.tokens)]:
            logits, kvcache = gpt2_kvcache.gpt2(s.tokens[:end], **s.params, n_head=s.n_head, kvcache=kvcache)
            difference = max(difference, float(abs(logits - expected[end - len(logits) : end]).max()))
        yield f"logit difference to no cache, {name}", "{difference:.1e}", {"difference": difference}
    prompts = [s.encoder.encode(text) for text in ("Once upon a time", "The king", "In the")]
    plain, cached = ([m.generate(p, s.params, s.n_head, 30) for p in prompts] for m in (gpt2, gpt2_kvcache))
    yield "texts with and without the cache", "{texts}", {"texts": "identical" if plain == cached else "DIFFERENT"}


def decode(s):
    """The roof, and steps over it."""
    steps = {n: step_at(s, n) for n in places(len(s.tokens))}
    roof, *times = alternate({"roof": bare_products(s.params, 1), **steps}, max(s.n_rounds, 15)).values()
    yield "the roof: bare products of one token", "{ms:.2f} ms", {"ms": ms(roof)}
    for n, t in zip(steps, times, strict=True):
        numbers = {"n": n, "ms": ms(t), "times_the_roof": ratio(t, roof)}
        yield f"decode, {n} tokens cached", "{ms:.2f} ms, {times_the_roof:.2f} x the roof", numbers
    yield "the last of these over the first", "{ratio:.2f}", {"ratio": ratio(times[-1], times[0])}


def prompts(s):
    """Prompts beside the bare products of as many rows, and the longest in pieces."""
    for n, run in prompts_of(s).items():
        bare, prompt = alternate({"bare": bare_products(s.params, n), "prompt": run}, max(s.n_rounds, 9)).values()
        yield f"bare products of {n} tokens", "{ms:.1f} ms", {"n": n, "ms": ms(bare)}
        numbers = {"n": n, "ms": ms(prompt), "share": ratio(bare, prompt)}
        yield "prefill of as many", "{ms:.1f} ms, {share:.2f} of their rate", numbers
    pieces = {size: partial(run, chunk=size) for size in (n // 8, n // 4, n // 2, n)}
    for size, t in alternate(pieces, s.n_rounds).items():
        yield f"    in pieces of {size} tokens", "{ms:.1f} ms", {"size": size, "ms": ms(t)}


def speedup(s):
    n = s.n_tokens or min(200, len(s.tokens) - 5)
    runs = {m: partial(m.generate, s.tokens[:4], s.params, s.n_head, n) for m in (gpt2, gpt2_kvcache)}
    plain, cached = alternate(runs, s.n_rounds).values()
    yield f"{n} tokens without the cache", "{s:.2f} s", {"n": n, "s": ms(plain) / 1e3}
    numbers = {"n": n, "s": ms(cached) / 1e3, "times": ratio(plain, cached)}
    yield "    with it", "{s:.2f} s, {times:.1f} x faster", numbers


def sampling(s):
    """What choosing a token costs: by itself, and in the time of whole steps, alone and in a batch of 16."""
    logits, _ = gpt2_kvcache.gpt2(s.tokens[:16], **s.params, n_head=s.n_head)  # [16, n_vocab]

    def choices(picks):
        return [pick(row) for pick, row in zip(picks, logits, strict=True)]

    def steps(picks):
        return gpt2_kvcache.generate(s.tokens[:1], s.params, s.n_head, 8, picks[0])

    def steps_of_16(picks):
        requests = [(s.tokens[i : i + 1], pick) for i, pick in enumerate(picks)]
        return list(batch.stream_batch(requests, s.params, s.n_head, 8))

    picks = {name: [sampler(**settings, seed=i) for i in range(16)] for name, settings in SETTINGS.items()}
    choice, one, many = (
        alternate({name: partial(run, some) for name, some in picks.items()}, max(s.n_rounds, 15))
        for run in (choices, steps, steps_of_16)
    )
    for name, settings in SETTINGS.items():
        numbers = {"ms": ms(choice[name]) / 16, "step": ratio(one[name], one["greedy"])} | settings
        numbers["step_of_16"] = ratio(many[name], many["greedy"])
        label = " ".join(["choosing a token,", name, *map(str, settings.values())])
        yield label, "{ms:.3f} ms; {step:.2f} x a greedy step, {step_of_16:.2f} x one of 16", numbers


def batches(s):
    """Tokens per second of several texts at once, greedy and drawn, beside one alone and one without the cache."""
    n = s.n_tokens or min(48, len(s.tokens) // 4)
    one, runs = (s.tokens[:5], s.params, s.n_head, n), {}

    def write(size, settings):
        requests = [(s.tokens[i : i + 5 + i], sampler(**settings, seed=i)) for i in range(size)]
        list(batch.stream_batch(requests, s.params, s.n_head, n))

    for way in ("greedy", "top_p"):
        runs[way, 1] = partial(gpt2_kvcache.generate, *one, sampler(**SETTINGS[way], seed=0))
        runs |= {(way, size): partial(write, size, SETTINGS[way]) for size in (8, 16)}
    seconds = alternate({"plain": partial(gpt2.generate, *one), **runs}, max(s.n_rounds, 9))
    yield "tokens per second without the cache", "{rate:.1f}", {"n": n, "rate": n / ms(seconds["plain"]) * 1e3}
    for size in (1, 8, 16):
        greedy, drawn = seconds["greedy", size], seconds["top_p", size]
        numbers = {"n": n, "size": size, "rate": n * size / ms(greedy) * 1e3, "rate_top_p": n * size / ms(drawn) * 1e3}
        numbers["gain"] = size * ratio(seconds["greedy", 1], greedy)
        yield f"tokens per second, {size} at once", "{rate:.1f}, {gain:.2f} x one; top_p: {rate_top_p:.1f}", numbers


def passes(s):
    """What a pass over several tokens costs, in passes over one: the table in speculative.py."""
    n_past = len(s.tokens) // 4
    steps = {n: step_at(s, n_past, n) for n in speculative.COST_TOKENS if n_past + n <= len(s.tokens)}
    seconds = alternate(steps, max(s.n_rounds, 21))
    costs = {n: round(ratio(t, seconds[1]), 2) for n, t in seconds.items()}
    for n, cost in list(costs.items())[1:]:
        yield f"{n} tokens in one pass", "{cost:.2f} x one token's", {"n": n, "n_past": n_past, "cost": cost}
    yield "    as speculative.COST", "{costs}", {"costs": tuple(costs.values())}


def guessing(s):
    """Prompt lookup on a text that repeats and on one that doesn't; a draft of the model's own first blocks."""
    n, n_new, blocks = len(s.tokens) // 16, len(s.tokens) // 4, s.params["blocks"]
    draft = {**s.params, "blocks": blocks[: max(1, len(blocks) // 6)]}
    hot = partial(sampler, temperature=100.0, seed=0)  # so hot that any token may come

    def ahead(prompt, guesser):
        return list(speculative.passes(prompt, s.params, s.n_head, n_new, guesser))

    repetitions = [(s.tokens[:k] * n)[:n] for k in range(1, 7)]
    repeating = min(repetitions, key=lambda prompt: len(ahead(prompt, speculative.by_lookup())))  # in fewest passes
    by_draft = speculative.by_draft(draft, s.n_head, chooser(), np.random.default_rng(0))
    for name, prompt, pick, guesser in (
        ("lookup, repeating text", repeating, sampler(), speculative.by_lookup()),
        ("lookup, random text", s.tokens[:n], hot(), speculative.by_lookup(hot())),
        ("draft of the first blocks", repeating, sampler(), by_draft),
    ):
        plain = partial(gpt2_kvcache.generate, prompt, s.params, s.n_head, n_new, pick)
        seconds = alternate({"plain": plain, "ahead": partial(ahead, prompt, guesser)}, s.n_rounds)
        made = ahead(prompt, guesser)
        numbers = {"held": sum(one.n_accepted for one in made), "guessed": sum(one.n_guessed for one in made)}
        numbers["gain"] = ratio(seconds["plain"], seconds["ahead"])
        yield name, "{gain:.2f} x plain decoding; {held} of {guessed} guesses held", numbers


def startup(s):
    """From the shell to the first token, as a multiple of `import numpy`, and the memory that it takes at most."""
    run, n_embd = partial(subprocess.run, capture_output=True, check=True), s.params["wpe"].shape[1]
    one_token = [sys.executable, Path(gpt2_kvcache.__file__), "Once", "--n_tokens_to_generate", "1", *s.model]
    runs = {"ours": partial(run, one_token), "numpy": partial(run, [sys.executable, "-c", "import numpy"])}
    ours, numpy = alternate(runs, s.n_rounds).values()
    numbers = {"s": ms(ours) / 1e3, "times": ratio(ours, numpy)}
    yield "from the shell to the first token", "{s:.2f} s, {times:.1f} x import numpy", numbers
    # started by a small process, since Linux counts the memory of the one that starts another as the other's, too
    code = (
        "import resource, subprocess, sys; subprocess.run(sys.argv[1:], capture_output=True, check=True);"
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * (1 if sys.platform == 'darwin' else 1024))"
    )
    peak = int(run([sys.executable, "-c", code, *one_token]).stdout)
    numbers = {"mb": peak / 1e6, "times": peak / 4 / (speculative.n_weights(s.params) + s.params["wpe"].size)}
    yield "    peak memory", "{mb:.0f} MB, {times:.2f} x the weights", numbers
    yield "cache bytes per token", "{bytes:,}", {"bytes": 2 * len(s.params["blocks"]) * n_embd * 4}


def by_position(s):
    """What the next token costs when so many are there, with the cache and without."""
    n_ctx, n_steps = len(s.tokens), 10

    def steps(step):
        for _ in range(n_steps):  # as in a text: a single step after so long a pass finds every cache cold
            step()

    for n in sorted({4, 16, *(n_ctx * i // 8 for i in range(1, 8)), n_ctx - 1} - {n_ctx}):
        runs = {"cached": partial(steps, step_at(s, n))}
        runs["plain"] = partial(gpt2.gpt2, s.tokens[: n + 1], **s.params, n_head=s.n_head)
        cached, plain = alternate(runs, min(s.n_rounds, 5)).values()
        numbers = {"n": n, "ms": ms(cached) / n_steps, "ms_plain": ms(plain)}
        yield f"next token after {n}: with / without the cache", "{ms:.2f} / {ms_plain:.2f} ms", numbers


def transformers_config(params, n_head):
    """The arguments of transformers' GPT2Config for a model."""
    (n_ctx, n_embd), blocks = params["wpe"].shape, params["blocks"]
    sizes = {"vocab_size": len(params["wte"]), "n_positions": n_ctx, "n_embd": n_embd, "n_head": n_head}
    sizes |= {"n_layer": len(blocks), "n_inner": len(blocks[0]["mlp"]["c_proj"]["w"])}
    epsilon = {"layer_norm_epsilon": float(params["ln_f"]["eps"])} if "eps" in params["ln_f"] else {}
    return {**sizes, **epsilon, "bos_token_id": 0, "eos_token_id": 0}


def torch_model(params, n_head):
    """The same weights in Hugging Face transformers' GPT2LMHeadModel. (Its Conv1D keeps [n_in, n_out] like OpenAI.)"""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(**transformers_config(params, n_head))).eval()
    model.transformer.load_state_dict({name: torch.from_numpy(np.array(w)) for name, w in by_their_names(params)})
    model.tie_weights()
    return model


def beside_transformers(s):
    """Our time over transformers', both with their default threads: decode near and far, and prompts."""
    import torch
    from transformers import DynamicCache

    model = torch_model(s.params, s.n_head)

    def prompt(n):
        ids = torch.tensor([s.tokens[:n]])
        return model(ids, past_key_values=DynamicCache(), use_cache=True, logits_to_keep=1).past_key_values

    def step(past, token):
        model(torch.tensor([[token]]), past_key_values=past, use_cache=True).past_key_values.crop(-1)

    with torch.no_grad():
        ns = places(len(s.tokens))
        pairs = {f"decode at {n}": (step_at(s, n), partial(step, prompt(n), s.tokens[n])) for n in ns}
        pairs |= {f"prefill {n}": (run, partial(prompt, n)) for n, run in prompts_of(s).items()}
        for name, (ours, theirs) in pairs.items():
            a, b = alternate({"ours": ours, "theirs": theirs}, max(s.n_rounds, 15)).values()
            numbers = {"ms": ms(a), "torch_ms": ms(b), "ratio": ratio(a, b)}
            yield f"{name}: ours over transformers'", "{ms:.2f} ms over {torch_ms:.2f} ms = {ratio:.2f}", numbers
    yield "    torch", "{version} on {n} threads", {"version": torch.__version__, "n": torch.get_num_threads()}


SECTIONS = (correctness, decode, prompts, speedup, sampling, batches, passes, guessing, startup, by_position)


def blas():
    """The BLAS library behind NumPy's products; threadpoolctl, where it is installed, knows the kernel, too."""
    name = np.show_config("dicts")["Build Dependencies"]["blas"]["name"]
    if find_spec("threadpoolctl") is None:
        return f"{name} (its kernel: pip install threadpoolctl)"
    from threadpoolctl import threadpool_info

    known = [(x["internal_api"], x.get("architecture", "")) for x in threadpool_info() if x["user_api"] == "blas"]
    return ", ".join(f"{library} {kernel}" for library, kernel in known) or name


def machine():
    """What the numbers were measured on."""
    cpuinfo = Path("/proc/cpuinfo")
    name = re.search("model name\\s*: (.*)", cpuinfo.read_text() if cpuinfo.exists() else "")
    cpu = name[1] if name else platform.processor() or platform.machine()
    return f"{cpu}, {os.cpu_count()} cores, Python {platform.python_version()}, NumPy {np.__version__}, {blas()}"


def plot_chart(known, path):
    """The chart: time of the next token against how many are there, both curves."""
    from matplotlib.figure import Figure

    positions, cached, plain = ([row[key] for row in known["by_position"]] for key in ("n", "ms", "ms_plain"))
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(positions, plain, "o-", label="without the cache (gpt2.py)")
    axes.plot(positions, cached, "s-", label="with the cache (gpt2_kvcache.py)")
    axes.axhline(known["decode"][0]["ms"], color="gray", linestyle=":", label="reading every weight once (the roof)")
    axes.set(xlabel="tokens in the window", ylabel="milliseconds for the next token", yscale="log")
    axes.set_title(f"{known['model']}: time per token\n{known['machine']}", fontsize=9)
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    figure.savefig(path, dpi=120)


def main(
    model_size: str = "fairytale",
    models_dir: str = None,
    rounds: int = 9,
    n_tokens: int = None,
    json: str = None,
    plot: str = None,
    torch: bool = False,
):
    """Check and time a model with and without the cache."""
    at_least(1, rounds=rounds, n_tokens=n_tokens)
    for option, value, packages in (("plot", plot, ["matplotlib"]), ("torch", torch, ["torch", "transformers"])):
        missing = [name for name in packages if value and find_spec(name) is None]
        if missing:
            raise OSError(f"--{option} needs more packages: pip install {' '.join(missing)}")
    for path in filter(None, (json, plot)):
        if not Path(path).resolve().parent.is_dir():
            raise ValueError(f"no folder for {path}")
    encoder, hparams, params = load_encoder_hparams_and_params(model_size, models_dir)
    tokens = np.random.default_rng(0).integers(0, len(params["wte"]), len(params["wpe"])).tolist()
    model = ["--model_size", model_size, *(["--models_dir", models_dir] if models_dir else [])]
    setup = Setup(encoder, params, hparams["n_head"], tokens, rounds, n_tokens, model)
    known = {"model": model_size, "machine": machine(), "rounds": rounds}
    print(f"model {model_size}; {known['machine']}; medians of {rounds} rounds or more, {min(rounds, 5)} by position")
    for section in (*SECTIONS, *([beside_transformers] if torch else [])):
        rows = known[section.__name__] = []
        for label, text, numbers in section(setup):
            print(f"{label:52}{text.format(**numbers)}", flush=True)
            rows.append({"row": label.strip(), **numbers})
            if json:
                Path(json).write_text(dumps(known, indent=2) + "\n")
        if plot and section is by_position:
            plot_chart(known, plot)


if __name__ == "__main__":
    from command_line import run

    run(main)
