"""Is the cache right, and how fast is it? One command checks and times a model and prints what it found.

Every comparison alternates between its sides in one run and takes the median of the rounds' ratios, so that other work
on the machine disturbs all alike. The roof is the time of the bare products of one row with every weight matrix: a
decode step can't be faster than reading the weights.

SECTIONS lists what is measured. A section is a function that takes a Setup and yields its rows as they are known.
"""

import os
import platform
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
from kvcache import cached_length
from sampling import at_least, chooser, sampler
from utils import load_encoder_hparams_and_params

HERE = Path(__file__).resolve().parent
TOP_P = {"top_p": 0.95}
WAYS = {"greedy": {}, "temperature 0.8": {"temperature": 0.8}, "top_k 40": {"top_k": 40}, "top_p 0.95": TOP_P}
HOT = {"temperature": 100.0, "seed": 0}  # so hot that all tokens are about equally probable


class Setup(NamedTuple):
    """What the sections measure, and how often."""

    encoder: Encoder
    params: dict
    n_head: int
    tokens: list  # n_ctx random ids
    model: list  # the arguments of a command line that name the model
    n_rounds: int
    n_tokens: int | None  # how many the texts of speedup and batches have, None for a number that fits the window


def row(label, text, **numbers):
    """(label, text, numbers) of one row of the table. text: a format string for the numbers, which --json keeps."""
    return label, text.format(**numbers), numbers


def alternate(functions, n_rounds):
    """Runs the functions of a dict in turn, once to warm up and n_rounds times. -> key: seconds [n_rounds]."""
    for function in functions.values():
        function()
    seconds = {key: np.zeros(n_rounds) for key in functions}
    for i in range(n_rounds):
        for key, function in functions.items():
            start = time.perf_counter()
            function()
            seconds[key][i] = time.perf_counter() - start
    return seconds


def ratio(seconds, other):
    return float(np.median(seconds / other))


def ms(seconds):
    return float(np.median(seconds)) * 1e3


def matrices(params):
    """Every weight matrix that a token is multiplied with, in the order of the forward pass."""
    for block in params["blocks"]:
        for layer in (*block["attn"].values(), *block["mlp"].values()):
            yield layer["w"]
    yield params["wte"].T


def bare_products(params, n_rows):
    """A function that multiplies n_rows rows with every matrix (one row with wte, as a prompt does), nothing else."""
    rng = np.random.default_rng(0)
    *inner, last = matrices(params)
    rows = {n: rng.standard_normal((n_rows, n), dtype=np.float32) for n in {len(w) for w in inner}}
    one = rng.standard_normal((1, len(last)), dtype=np.float32)

    def products():
        for w in inner:
            rows[len(w)] @ w
        one @ last

    return products


def run_after(s, n_past, n_new=1):
    """A function that runs n_new tokens after n_past cached ones."""
    _, kvcache = gpt2_kvcache.prefill(s.tokens[:n_past], s.params, s.n_head)
    return lambda: gpt2_kvcache.gpt2(s.tokens[: n_past + n_new], **s.params, n_head=s.n_head, kvcache=kvcache)


def prefill(s, n, **chunk):
    """A function that runs a prompt of n tokens."""
    return lambda: gpt2_kvcache.prefill(s.tokens[:n], s.params, s.n_head, **chunk)


def places(n_ctx):
    """Numbers of cached tokens at which a step is timed: few, 300, far into the window, almost at its end."""
    end = n_ctx - 24 if n_ctx > 48 else n_ctx - 1
    return [min(10, n_ctx // 2), *([300] if n_ctx > 350 else []), n_ctx * 900 // 1024, end]


def prompt_sizes(n_ctx):
    return sorted({min(64, n_ctx), min(512, n_ctx)})


def largest_differences(s):
    """Largest logit difference over a window: one token at a time, in chunks of 7, and whole, against no cache."""
    expected = gpt2.gpt2(s.tokens, **s.params, n_head=s.n_head)  # [n_ctx, n_vocab]
    worst = {}
    for name, size in (("one token at a time", 1), ("in chunks of 7", 7), ("in one piece", len(s.tokens))):
        kvcache, worst[name] = None, 0.0
        for end in [*range(size, len(s.tokens), size), len(s.tokens)]:
            n_past = cached_length(kvcache)
            logits, kvcache = gpt2_kvcache.gpt2(s.tokens[:end], **s.params, n_head=s.n_head, kvcache=kvcache)
            worst[name] = max(worst[name], float(abs(logits - expected[n_past:end]).max()))
    return worst


def correctness(s):
    worst = largest_differences(s)
    for name, difference in {"cached against uncached": max(worst.values()), **worst}.items():
        label = f"    {name}" if name in worst else f"largest logit difference, {name}"
        yield row(label, "{difference:.1e}", difference=difference)
    prompts = [s.encoder.encode(text) for text in ("Once upon a time", "The king", "In the")]
    plain, cached = ([m.generate(p, s.params, s.n_head, 30) for p in prompts] for m in (gpt2, gpt2_kvcache))
    yield row("texts with and without the cache", "{texts}", texts="identical" if plain == cached else "DIFFERENT")


def decode(s):
    """The roof, and steps after several numbers of cached tokens."""
    steps = {n: run_after(s, n) for n in places(len(s.tokens))}
    seconds = alternate({"roof": bare_products(s.params, 1), **steps}, max(s.n_rounds, 15))
    roof = seconds.pop("roof")
    yield row("the roof: bare products of one token", "{ms:.2f} ms", ms=ms(roof))
    for n, t in seconds.items():
        text = "{ms:.2f} ms, {times_the_roof:.2f} x the roof"
        yield row(f"decode, {n} tokens cached", text, n=n, ms=ms(t), times_the_roof=ratio(t, roof))
    first, *_, last = seconds.values()
    yield row("the last of these over the first", "{ratio:.2f}", ratio=ratio(last, first))


def prompts(s):
    """Prompts beside the bare products for as many rows, and the longest of them in pieces."""
    for n in prompt_sizes(len(s.tokens)):
        seconds = alternate({"bare": bare_products(s.params, n), "prompt": prefill(s, n)}, max(s.n_rounds, 9))
        yield row(f"bare products of {n} tokens", "{ms:.1f} ms", n=n, ms=ms(seconds["bare"]))
        share = ratio(seconds["bare"], seconds["prompt"])
        yield row("prefill of as many", "{ms:.1f} ms, {share:.2f} of their rate", ms=ms(seconds["prompt"]), share=share)
    chunks = sorted({max(n // 8, 1), max(n // 4, 1), max(n // 2, 1), n})
    for chunk, t in alternate({c: prefill(s, n, chunk=c) for c in chunks}, s.n_rounds).items():
        yield row(f"    in pieces of {chunk} tokens", "{ms:.1f} ms", chunk=chunk, ms=ms(t))


def speedup(s):
    n = s.n_tokens or min(200, len(s.tokens) - 5)
    ways = {m: partial(m.generate, s.tokens[:4], s.params, s.n_head, n) for m in (gpt2, gpt2_kvcache)}
    seconds = alternate(ways, s.n_rounds)
    plain, cached = seconds[gpt2], seconds[gpt2_kvcache]
    yield row(f"{n} tokens without the cache", "{s:.2f} s", n=n, s=ms(plain) / 1e3)
    yield row("    with it", "{s:.2f} s, {times:.1f} x faster", n=n, s=ms(cached) / 1e3, times=ratio(plain, cached))


def sampling(s):
    """What choosing tokens costs: per choice, and in the time of whole steps, alone and in a batch of 16."""
    logits, _ = gpt2_kvcache.gpt2(s.tokens[:8], **s.params, n_head=s.n_head)  # [8, n_vocab]

    def choose(settings):
        for pick, one in zip([sampler(**settings, seed=0)] * len(logits), logits, strict=True):
            pick(one)

    def alone(settings):
        gpt2_kvcache.generate(s.tokens[:1], s.params, s.n_head, 8, sampler(**settings, seed=0))

    def together(settings):
        requests = [(s.tokens[i : i + 1], sampler(**settings, seed=i)) for i in range(16)]
        list(batch.stream_batch(requests, s.params, s.n_head, 8))

    n_rounds = max(s.n_rounds, 15)
    choice, one, many = (
        alternate({name: partial(run, settings) for name, settings in WAYS.items()}, n_rounds)
        for run in (choose, alone, together)
    )
    for name in WAYS:
        step, step_of_16 = ratio(one[name], one["greedy"]), ratio(many[name], many["greedy"])
        text = "{ms:.3f} ms; a step {step:.2f} x a greedy one, of 16 {step_of_16:.2f} x"
        yield row(f"choosing, {name}", text, ms=ms(choice[name]) / len(logits), step=step, step_of_16=step_of_16)


def batches(s):
    """Tokens per second of several texts at once, beside one alone, with and without the cache."""
    n = s.n_tokens or min(48, len(s.tokens) // 4)

    def write(size, settings):
        requests = [(s.tokens[i : i + 5 + i], sampler(**settings, seed=i)) for i in range(size)]
        list(batch.stream_batch(requests, s.params, s.n_head, n))

    def write_one(module, settings):
        module.generate(s.tokens[:5], s.params, s.n_head, n, sampler(**settings, seed=0))

    runs = {"plain": partial(write_one, gpt2, {})}
    for name, settings in (("greedy", {}), ("drawn", TOP_P)):
        runs[1, name] = partial(write_one, gpt2_kvcache, settings)
        runs |= {(size, name): partial(write, size, settings) for size in (8, 16)}
    seconds = alternate(runs, max(s.n_rounds, 9))
    yield row("tokens per second without the cache", "{rate:.1f}", n=n, rate=n / ms(seconds["plain"]) * 1e3)
    for size in (1, 8, 16):
        t, drawn = seconds[size, "greedy"], seconds[size, "drawn"]
        numbers = {"rate": n * size / ms(t) * 1e3, "gain": size * ratio(seconds[1, "greedy"], t)}
        numbers |= {"rate_top_p": n * size / ms(drawn) * 1e3, "top_p_over_greedy": ratio(t, drawn)}
        text = "{rate:.1f}, {gain:.2f} x one; {rate_top_p:.1f} with top_p, {top_p_over_greedy:.2f} x greedy"
        yield row(f"tokens per second, {size} at once", text, size=size, **numbers)


def passes(s):
    """What one pass over several tokens costs, in passes over one: the table in speculative.py."""
    n_past = len(s.tokens) // 4
    sizes = [n for n in speculative.COST_TOKENS if n_past + n <= len(s.tokens)]
    seconds = alternate({n: run_after(s, n_past, n) for n in sizes}, max(s.n_rounds, 21))
    costs = {n: ratio(t, seconds[1]) for n, t in seconds.items()}
    for n in sizes[1:]:
        yield row(f"{n} tokens in one pass", "{cost:.2f} x one token's", n=n, cost=costs[n])
    cost = tuple(round(cost, 2) for cost in costs.values())
    yield row("    as speculative.COST", "{cost}", n_past=n_past, sizes=sizes, cost=cost)


def repeating_prompt(s, n, n_new):
    """n tokens, a few of them again and again: those few whose repetition the model goes on with best."""

    def n_accepted(prompt):
        made = speculative.passes(prompt, s.params, s.n_head, n_new, speculative.by_lookup())
        return sum(one.n_accepted for one in made)

    return max(((s.tokens[:k] * n)[:n] for k in range(1, 7)), key=n_accepted)


def guessing(s):
    """Prompt lookup on a text that repeats and on one that doesn't; a draft of the model's own first blocks."""
    n, n_new, blocks = len(s.tokens) // 16, len(s.tokens) // 4, s.params["blocks"]
    repeating = repeating_prompt(s, n, n_new)
    draft = {**s.params, "blocks": blocks[: max(1, len(blocks) // 6)]}

    def by_draft():
        return speculative.by_draft(draft, s.n_head, chooser(), np.random.default_rng(0))

    def plain(prompt, settings):
        gpt2_kvcache.generate(prompt, s.params, s.n_head, n_new, sampler(**settings))

    def ahead(prompt, guesser):
        return list(speculative.passes(prompt, s.params, s.n_head, n_new, guesser()))

    for name, prompt, settings, guesser in (
        ("lookup, repeating text", repeating, {}, speculative.by_lookup),
        ("lookup, random text", s.tokens[:n], HOT, lambda: speculative.by_lookup(sampler(**HOT))),
        ("draft of the first blocks", repeating, {}, by_draft),
    ):
        made = ahead(prompt, guesser)
        runs = {"plain": partial(plain, prompt, settings), "ahead": partial(ahead, prompt, guesser)}
        seconds = alternate(runs, s.n_rounds)
        numbers = {"gain": ratio(seconds["plain"], seconds["ahead"]), "guessed": sum(one.n_guessed for one in made)}
        text = "{gain:.2f} x plain decoding; {accepted} of {guessed} guesses held"
        yield row(name, text, **numbers, accepted=sum(one.n_accepted for one in made))


def startup(s):
    """From the shell to the first token, as a multiple of `import numpy`, and the memory that it takes at most."""
    one_token = [sys.executable, str(HERE / "gpt2_kvcache.py"), "Once", "--n_tokens_to_generate", "1", *s.model]
    commands = {"ours": one_token, "numpy": [sys.executable, "-c", "import numpy"]}
    run = partial(subprocess.run, capture_output=True, check=True)
    seconds = alternate({name: partial(run, command) for name, command in commands.items()}, s.n_rounds)
    numbers = {"s": ms(seconds["ours"]) / 1e3, "times_import_numpy": ratio(seconds["ours"], seconds["numpy"])}
    yield row("from the shell to the first token", "{s:.2f} s, {times_import_numpy:.1f} x import numpy", **numbers)
    code = (
        "import resource, subprocess, sys; subprocess.run(sys.argv[1:], capture_output=True, check=True);"
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    )
    peak = int(run([sys.executable, "-c", code, *one_token]).stdout) * (1 if sys.platform == "darwin" else 1024)
    times = peak / (sum(w.nbytes for w in matrices(s.params)) + s.params["wpe"].nbytes)
    yield row(
        "    peak memory", "{mb:.0f} MB, {times_the_weights:.2f} x the weights", mb=peak / 1e6, times_the_weights=times
    )
    n_bytes = 2 * len(s.params["blocks"]) * s.params["wpe"].shape[1] * 4
    yield row("cache bytes per token", "{bytes:,}", bytes=n_bytes)


def by_position(s):
    """What the next token costs when so many are there, with the cache and without."""
    n_ctx, n_steps = len(s.tokens), 10

    def steps(run):
        for _ in range(n_steps):  # as in a text: a single step after so long a pass finds every cache cold
            run()

    for n in sorted({4, 16, *(n_ctx * i // 8 for i in range(1, 8)), n_ctx - 1} - {n_ctx}):
        plain = partial(gpt2.gpt2, s.tokens[: n + 1], **s.params, n_head=s.n_head)
        seconds = alternate({"cached": partial(steps, run_after(s, n)), "plain": plain}, min(s.n_rounds, 5))
        numbers = {"ms_cached": ms(seconds["cached"]) / n_steps, "ms_plain": ms(seconds["plain"])}
        label = f"next token after {n}: with / without the cache"
        yield row(label, "{ms_cached:.2f} / {ms_plain:.2f} ms", n=n, **numbers)


def transformers_config(params, n_head):
    """The arguments of transformers' GPT2Config for a model."""
    (n_ctx, n_embd), blocks = params["wpe"].shape, params["blocks"]
    return {
        "vocab_size": len(params["wte"]),
        "n_positions": n_ctx,
        "n_embd": n_embd,
        "n_head": n_head,
        "n_layer": len(blocks),
        "n_inner": len(blocks[0]["mlp"]["c_proj"]["w"]),
        "layer_norm_epsilon": float(params["ln_f"].get("eps", 1e-5)),
        "bos_token_id": 0,
        "eos_token_id": 0,
    }


def torch_model(params, n_head):
    """The same weights in Hugging Face transformers' GPT2LMHeadModel. (Its Conv1D keeps [n_in, n_out] like OpenAI.)"""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel
    from transformers.utils import logging

    logging.set_verbosity_error()
    model = GPT2LMHeadModel(GPT2Config(**transformers_config(params, n_head))).eval()
    model.transformer.load_state_dict({name: torch.from_numpy(np.array(w)) for name, w in by_their_names(params)})
    model.tie_weights()
    return model


def beside_transformers(s):
    """Our time over transformers', both with their default threads: decode near and far, and prompts."""
    import torch
    from transformers import DynamicCache

    model, text = torch_model(s.params, s.n_head), "{ms:.2f} ms over {torch_ms:.2f} ms = {ratio:.2f}"
    near, *_, far, _ = places(len(s.tokens))

    def step(past, token):
        model(torch.tensor([[token]]), past_key_values=past, use_cache=True)
        past.crop(-1)

    def prompt(n):
        ids = torch.tensor([s.tokens[:n]])
        return model(ids, past_key_values=DynamicCache(), use_cache=True, logits_to_keep=1).past_key_values

    with torch.no_grad():
        pairs = [(f"decode at {n}", run_after(s, n), partial(step, prompt(n), s.tokens[n])) for n in (near, far)]
        pairs += [(f"prefill {n}", prefill(s, n), partial(prompt, n)) for n in prompt_sizes(len(s.tokens))]
        for name, ours, theirs in pairs:
            a, b = alternate({"ours": ours, "theirs": theirs}, max(s.n_rounds, 15)).values()
            yield row(f"{name}: ours over transformers'", text, ms=ms(a), torch_ms=ms(b), ratio=ratio(a, b))
    yield row("    torch", "{version}, {threads} threads", version=torch.__version__, threads=torch.get_num_threads())


SECTIONS = (correctness, decode, prompts, speedup, sampling, batches, passes, guessing, startup, by_position)


def blas():
    """The BLAS library behind NumPy's products; threadpoolctl, where it is installed, knows the kernel, too."""
    name = np.show_config("dicts")["Build Dependencies"]["blas"]["name"]
    if find_spec("threadpoolctl") is None:
        return f"{name} (for its kernel: pip install threadpoolctl)"
    from threadpoolctl import threadpool_info

    found = [library for library in threadpool_info() if library["user_api"] == "blas"]
    keys = ("internal_api", "version", "architecture")
    texts = [
        f"{' '.join(str(one[key]) for key in keys if key in one)} on {one['num_threads']} threads" for one in found
    ]
    return ", ".join(texts) or name


def machine():
    """What the numbers were measured on."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    cpu = names[0] if names else platform.processor() or platform.machine()
    return f"{cpu}, {os.cpu_count()} cores, Python {platform.python_version()}, NumPy {np.__version__}, {blas()}"


def plot_chart(known, path):
    """The chart: time of the next token against how many are there, both curves."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    rows, roof = known["by_position"], known["decode"][0]["ms"]
    positions, cached, plain = ([one[key] for one in rows] for key in ("n", "ms_cached", "ms_plain"))
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(positions, plain, "o-", label="without the cache (gpt2.py)")
    axes.plot(positions, cached, "s-", label="with the cache (gpt2_kvcache.py)")
    axes.axhline(roof, color="gray", linestyle=":", label="reading every weight once (the roof)")
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
    setup = Setup(encoder, params, hparams["n_head"], tokens, model, rounds, n_tokens)
    known = {"model": model_size, "machine": machine(), "rounds": rounds}
    print(f"model {model_size}; {known['machine']}; medians of {rounds} rounds or more, {min(rounds, 5)} by position")
    for section in (*SECTIONS, *([beside_transformers] if torch else [])):
        rows = known[section.__name__] = []
        for label, text, numbers in section(setup):
            print(f"{label:52}{text}", flush=True)
            rows.append({"row": label.strip(), **numbers})
            if json:
                Path(json).write_text(dumps(known, indent=2) + "\n")
        if plot and section is by_position:
            plot_chart(known, plot)


if __name__ == "__main__":
    from command_line import run

    run(main)
