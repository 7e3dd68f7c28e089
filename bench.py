"""Is the cache right, and how fast is it? One command checks and times a model and prints what it found.

Every comparison alternates between the two sides in one run and takes the median of the rounds' ratios, so that other
work on the machine disturbs both alike. The roof is the time of the bare products of one row with every weight matrix:
a decode step can't be faster than reading the weights.
"""

import os
import platform
import subprocess
import sys
import time
from importlib.util import find_spec
from json import dumps
from pathlib import Path

import numpy as np

import batch
import gpt2
import gpt2_kvcache
import speculative
from kvcache import cached_length
from sampling import at_least, chooser, greedy, sampler
from utils import load_encoder_hparams_and_params

HERE = Path(__file__).resolve().parent


def alternate(*functions, n_rounds):
    """Runs the functions in turn, once to warm up and n_rounds times. -> seconds, [n_functions, n_rounds]."""
    for function in functions:
        function()
    seconds = np.zeros((len(functions), n_rounds))
    for i in range(n_rounds):
        for row, function in zip(seconds, functions, strict=True):
            start = time.perf_counter()
            function()
            row[i] = time.perf_counter() - start
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


def cache_of(tokens, params, n_head, n):
    """A cache of n positions whose buffers are its own, as in a text that was written step by step."""
    _, kvcache = gpt2_kvcache.prefill(tokens[:n], params, n_head)
    return kvcache


def check(tokens, params, n_head):
    """Largest logit difference over a window: one token at a time, in chunks of 7, and whole, against no cache."""
    expected = gpt2.gpt2(tokens, **params, n_head=n_head)  # [n_ctx, n_vocab]
    worst = {}
    for name, size in (("one token at a time", 1), ("in chunks of 7", 7), ("in one piece", len(tokens))):
        kvcache, worst[name] = None, 0.0
        for end in [*range(size, len(tokens), size), len(tokens)]:
            n_past = cached_length(kvcache)
            logits, kvcache = gpt2_kvcache.gpt2(tokens[:end], **params, n_head=n_head, kvcache=kvcache)
            worst[name] = max(worst[name], float(abs(logits - expected[n_past:end]).max()))
    return worst


def repeating_prompt(tokens, params, n_head, n, n_new):
    """n tokens, a few of them again and again: those few whose repetition the model goes on with best."""

    def n_accepted(prompt):
        counts = {}
        list(speculative.stream(prompt, params, n_head, n_new, *speculative.by_lookup(), counts=counts))
        return counts["accepted"]

    return max(((tokens[:k] * n)[:n] for k in range(1, 7)), key=n_accepted)


def speculation(tokens, params, n_head, n_rounds):
    """What checking several tokens in one pass costs, and what guessing gains.

    Prompt lookup on a text that repeats and on one that doesn't (drawn at a temperature that makes it all but uniform);
    a draft model, made of the model's own first blocks, on the first of these.
    """
    n_ctx = len(tokens)
    n_past, n_new = n_ctx // 4, n_ctx // 4
    kvcache = cache_of(tokens, params, n_head, n_past)
    sizes = (1, 2, 4, 8, 16)
    one, *several = alternate(
        *(lambda n=n: gpt2_kvcache.gpt2(tokens[: n_past + n], **params, n_head=n_head, kvcache=kvcache) for n in sizes),
        n_rounds=max(n_rounds, 15),
    )
    result = {"passes": {n: ratio(t, one) for n, t in zip(sizes[1:], several, strict=True)}}
    repeating = repeating_prompt(tokens, params, n_head, n_ctx // 16, n_new)
    draft = {**params, "blocks": params["blocks"][: max(1, len(params["blocks"]) // 6)]}
    price = speculative.n_weights(draft) / speculative.n_weights(params)
    hot = {"temperature": 100.0, "seed": 0}

    def by_draft():
        return speculative.by_draft(draft, n_head, chooser(), np.random.default_rng(0))

    for name, prompt, settings, way, cost in (
        ("lookup, repeating text", repeating, {}, speculative.by_lookup, 0.0),
        ("lookup, random text", tokens[: n_ctx // 16], hot, lambda: speculative.by_lookup(sampler(**hot)), 0.0),
        ("draft of the first blocks", repeating, {}, by_draft, price),
    ):
        counts = {}

        def plain(prompt=prompt, settings=settings):
            gpt2_kvcache.generate(prompt, params, n_head, n_new, sampler(**settings))

        def ahead(prompt=prompt, way=way, cost=cost, counts=counts):
            list(speculative.stream(prompt, params, n_head, n_new, *way(), price=cost, counts=counts))

        seconds = alternate(plain, ahead, n_rounds=n_rounds)
        result[name] = {"gain": ratio(*seconds), **counts}
    return result


def time_by_position(tokens, params, n_head, n_rounds, bar):
    """[(position, ms with the cache, ms without)]: what the next token costs when so many are there."""
    n_ctx, n_steps, points = len(tokens), 10, []
    for n in sorted({4, 16, *(n_ctx * i // 8 for i in range(1, 8)), n_ctx - 1}):
        kvcache = cache_of(tokens, params, n_head, n)

        def cached(n=n, kvcache=kvcache):
            for _ in range(n_steps):  # as in a text: a single step after so long a pass finds every cache cold
                gpt2_kvcache.prefill(tokens[: n + 1], params, n_head, kvcache)

        def plain(n=n):
            gpt2.gpt2(tokens[: n + 1], **params, n_head=n_head)

        with_cache, without = alternate(cached, plain, n_rounds=n_rounds)
        points.append((n, ms(with_cache) / n_steps, ms(without)))
        bar.update()
    return points


def measure(encoder, params, n_head, n_rounds, bar):
    """Everything but start and torch, as a dict of numbers."""
    n_ctx, n_embd = params["wpe"].shape
    n_vocab, n_layer = len(params["wte"]), len(params["blocks"])
    tokens = np.random.default_rng(0).integers(0, n_vocab, n_ctx).tolist()
    result = {"cache_bytes_per_token": 2 * n_layer * n_embd * 4}

    result["largest_logit_difference"] = check(tokens, params, n_head)
    bar.update()
    prompts = [encoder.encode(text) for text in ("Once upon a time", "The king", "In the")]
    texts = [[g(p, params, n_head, 30) for p in prompts] for g in (gpt2.generate, gpt2_kvcache.generate)]
    result["texts_match"] = texts[0] == texts[1]
    bar.update()

    near, far = min(10, n_ctx // 2), n_ctx * 900 // 1024
    steps = {}
    for n in (near, far, n_ctx - 24 if n_ctx > 48 else n_ctx - 1):
        kvcache = cache_of(tokens, params, n_head, n)
        steps[n] = lambda n=n, kvcache=kvcache: gpt2_kvcache.prefill(tokens[: n + 1], params, n_head, kvcache)
    roof, *times = alternate(bare_products(params, 1), *steps.values(), n_rounds=max(n_rounds, 15))
    result["roof_ms"] = ms(roof)
    result["decode"] = {n: {"ms": ms(t), "times_the_roof": ratio(t, roof)} for n, t in zip(steps, times, strict=True)}
    result["last_step_over_first"] = ratio(times[2], times[0])
    bar.update()

    n = min(512, n_ctx)
    products, prefill = alternate(
        bare_products(params, n), lambda: gpt2_kvcache.prefill(tokens[:n], params, n_head), n_rounds=max(n_rounds, 9)
    )
    share = ratio(products, prefill)
    result["prefill"] = {"tokens": n, "ms": ms(prefill), "bare_products_ms": ms(products), "share_of_their_rate": share}
    bar.update()
    chunks = [n // 8, n // 4, n // 2, n]
    pieces = [lambda c=c: gpt2_kvcache.prefill(tokens[:n], params, n_head, chunk=c) for c in chunks]
    seconds = alternate(*pieces, n_rounds=n_rounds)
    result["prefill"]["ms_in_pieces_of"] = {c: ms(t) for c, t in zip(chunks, seconds, strict=True)}
    bar.update()

    prompt, n_new = tokens[:4], min(200, n_ctx - 5)
    cached, plain = alternate(
        lambda: gpt2_kvcache.generate(prompt, params, n_head, n_new),
        lambda: gpt2.generate(prompt, params, n_head, n_new),
        n_rounds=n_rounds,
    )
    result["speedup"] = {"tokens": n_new, "s_cached": ms(cached) / 1e3, "s_plain": ms(plain) / 1e3}
    result["speedup"]["ratio"] = ratio(plain, cached)
    bar.update()

    n_each = min(48, n_ctx // 4)
    groups = {size: [(tokens[i : i + 5 + i], greedy) for i in range(size)] for size in (1, 8, 16)}
    runs = [lambda g=g: list(batch.stream_batch(g, params, n_head, n_each)) for g in groups.values()]
    runs[0] = lambda: gpt2_kvcache.generate(tokens[:5], params, n_head, n_each)
    seconds = alternate(*runs, n_rounds=max(n_rounds, 9))
    result["tokens_per_second"] = {size: n_each * size / ms(t) * 1e3 for size, t in zip(groups, seconds, strict=True)}
    result["batch_gain"] = {size: size * ratio(seconds[0], t) for size, t in zip(groups, seconds, strict=True)}
    bar.update()

    result["guessing"] = speculation(tokens, params, n_head, n_rounds)
    bar.update()

    result["ms_by_position"] = time_by_position(tokens, params, n_head, min(n_rounds, 5), bar)
    return result


def start(model_size, models_dir, n_rounds):
    """From the shell to the first token, as a multiple of `import numpy`, and the memory that it takes at most."""
    model = ["--model_size", model_size, *(["--models_dir", models_dir] if models_dir else [])]
    one_token = [sys.executable, str(HERE / "gpt2_kvcache.py"), "Once", "--n_tokens_to_generate", "1", *model]
    ours, numpy = alternate(
        lambda: subprocess.run(one_token, capture_output=True, check=True),
        lambda: subprocess.run([sys.executable, "-c", "import numpy"], check=True),
        n_rounds=n_rounds,
    )
    code = (
        "import os, resource, subprocess, sys; subprocess.run(sys.argv[1:], capture_output=True, check=True);"
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024)"
    )
    peak = subprocess.run([sys.executable, "-c", code, *one_token], capture_output=True, check=True).stdout
    return {
        "s": ms(ours) / 1e3,
        "import_numpy_s": ms(numpy) / 1e3,
        "ratio": ratio(ours, numpy),
        "peak_bytes": int(peak),
    }


def torch_model(params, n_head):
    """The same weights in Hugging Face transformers' GPT2LMHeadModel. (Its Conv1D keeps [n_in, n_out] like OpenAI.)"""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel
    from transformers.utils import logging

    logging.set_verbosity_error()
    n_ctx, n_embd = params["wpe"].shape
    config = GPT2Config(
        vocab_size=len(params["wte"]),
        n_positions=n_ctx,
        n_embd=n_embd,
        n_head=n_head,
        n_layer=len(params["blocks"]),
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config).eval()
    names = {"w": "weight", "g": "weight", "b": "bias"}
    state = {"wte.weight": params["wte"], "wpe.weight": params["wpe"]}
    state |= {f"ln_f.{names[key]}": value for key, value in params["ln_f"].items()}
    for i, block in enumerate(params["blocks"]):
        for norm in ("ln_1", "ln_2"):
            state |= {f"h.{i}.{norm}.{names[key]}": value for key, value in block[norm].items()}
        for part in ("attn", "mlp"):
            for layer, weights in block[part].items():
                state |= {f"h.{i}.{part}.{layer}.{names[key]}": value for key, value in weights.items()}
    model.transformer.load_state_dict({name: torch.from_numpy(np.array(value)) for name, value in state.items()})
    model.tie_weights()
    return model


def compare_with_torch(params, n_head, n_rounds):
    """Our time over transformers', both with their default threads: decode near and far, and a prompt."""
    import torch
    from transformers import DynamicCache

    model, n_ctx = torch_model(params, n_head), len(params["wpe"])
    tokens = np.random.default_rng(0).integers(0, len(params["wte"]), n_ctx).tolist()
    pairs = {}
    with torch.no_grad():
        for n in (min(10, n_ctx // 2), n_ctx * 900 // 1024):
            kvcache = cache_of(tokens, params, n_head, n)
            past = model(torch.tensor([tokens[:n]]), use_cache=True).past_key_values

            def ours(n=n, kvcache=kvcache):
                gpt2_kvcache.prefill(tokens[: n + 1], params, n_head, kvcache)

            def theirs(n=n, past=past):
                model(torch.tensor([[tokens[n]]]), past_key_values=past, use_cache=True)
                past.crop(-1)

            pairs[f"decode_at_{n}"] = alternate(ours, theirs, n_rounds=max(n_rounds, 15))
        n = min(512, n_ctx)
        pairs[f"prefill_{n}"] = alternate(
            lambda: gpt2_kvcache.prefill(tokens[:n], params, n_head),
            lambda: model(torch.tensor([tokens[:n]]), past_key_values=DynamicCache(), use_cache=True, logits_to_keep=1),
            n_rounds=max(n_rounds, 9),
        )
    result = {name: {"ms": ms(a), "torch_ms": ms(b), "ratio": ratio(a, b)} for name, (a, b) in pairs.items()}
    return result | {"torch": torch.__version__, "threads": torch.get_num_threads()}


def machine():
    """What the numbers were measured on."""
    model = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        names = [line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines()]
        model = next((name for name in names if "CPU" in name or "Processor" in name or "EPYC" in name), model)
    return f"{model}, {os.cpu_count()} cores, Python {platform.python_version()}, NumPy {np.__version__}"


def report(r):
    """The lines of the table, each a label and a value."""
    speedup, prefill, start = r["speedup"], r["prefill"], r["start"]
    rows = [("largest logit difference, cached against uncached", f"{max(r['largest_logit_difference'].values()):.1e}")]
    rows += [(f"    {name}", f"{value:.1e}") for name, value in r["largest_logit_difference"].items()]
    rows += [("texts with and without the cache", "identical" if r["texts_match"] else "DIFFERENT")]
    rows += [("the roof: bare products of one token", f"{r['roof_ms']:.2f} ms")]
    for n, step in r["decode"].items():
        rows += [(f"decode, {n} tokens cached", f"{step['ms']:.2f} ms, {step['times_the_roof']:.2f} x the roof")]
    rows += [("the last of these over the first", f"{r['last_step_over_first']:.2f}")]
    rows += [(f"bare products of {prefill['tokens']} tokens", f"{prefill['bare_products_ms']:.1f} ms")]
    rows += [("prefill of as many", f"{prefill['ms']:.1f} ms, {prefill['share_of_their_rate']:.2f} of their rate")]
    rows += [(f"    in pieces of {n} tokens", f"{t:.1f} ms") for n, t in prefill["ms_in_pieces_of"].items()]
    rows += [(f"{speedup['tokens']} tokens without the cache", f"{speedup['s_plain']:.2f} s")]
    rows += [("    with it", f"{speedup['s_cached']:.2f} s, {speedup['ratio']:.1f} x faster")]
    for size, rate in r["tokens_per_second"].items():
        rows += [(f"tokens per second, {size} at once", f"{rate:.1f}, {r['batch_gain'][size]:.2f} x one")]
    for name, x in r["guessing"].items():
        if name == "passes":
            rows += [(f"{n} tokens in one pass", f"{cost:.2f} x one token's") for n, cost in x.items()]
        else:
            rows += [(name, f"{x['gain']:.2f} x plain decoding; {x['accepted']} of {x['guessed']} guesses held")]
    rows += [("cache bytes per token", f"{r['cache_bytes_per_token']:,}")]
    rows += [("from the shell to the first token", f"{start['s']:.2f} s, {start['ratio']:.1f} x import numpy")]
    rows += [("    peak memory", f"{start['peak_bytes'] / 1e6:.0f} MB, {start['peak_over_weights']:.2f} x the weights")]
    for name, value in r.get("torch", {}).items():
        if isinstance(value, dict):
            times = f"{value['ms']:.2f} ms over {value['torch_ms']:.2f} ms = {value['ratio']:.2f}"
            rows += [(f"{name.replace('_', ' ')}: ours over transformers'", times)]
    for n, cached, plain in r["ms_by_position"]:
        rows += [(f"next token after {n}: with / without the cache", f"{cached:.2f} / {plain:.2f} ms")]
    rounds = f"medians of {r['rounds']} rounds or more, {min(r['rounds'], 5)} by position"
    yield f"model {r['model']}; {r['machine']}; {rounds}"
    yield from (f"{label:52}{value}" for label, value in rows)


def draw(r, path):
    """The chart: time of the next token against how many are there, both curves."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    positions, cached, plain = zip(*r["ms_by_position"], strict=True)
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(positions, plain, "o-", label="without the cache (gpt2.py)")
    axes.plot(positions, cached, "s-", label="with the cache (gpt2_kvcache.py)")
    axes.axhline(r["roof_ms"], color="gray", linestyle=":", label="reading every weight once (the roof)")
    axes.set(xlabel="tokens in the window", ylabel="milliseconds for the next token", yscale="log")
    axes.set_title(f"{r['model']}: time per token\n{r['machine']}", fontsize=9)
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    figure.savefig(path, dpi=120)


def main(
    model_size: str = "fairytale",
    models_dir: str = None,
    rounds: int = 9,
    json: str = None,
    plot: str = None,
    torch: bool = False,
):
    """Check and time a model with and without the cache."""
    from tqdm import tqdm

    at_least(1, rounds=rounds)
    for option, value, packages in (("plot", plot, ["matplotlib"]), ("torch", torch, ["torch", "transformers"])):
        missing = [name for name in packages if value and find_spec(name) is None]
        if missing:
            raise OSError(f"--{option} needs more packages: pip install {' '.join(missing)}")
    for path in filter(None, (json, plot)):
        if not Path(path).resolve().parent.is_dir():
            raise ValueError(f"no folder for {path}")
    encoder, hparams, params = load_encoder_hparams_and_params(model_size, models_dir)
    n_head = hparams["n_head"]
    with tqdm(total=20 + torch, unit="part", disable=not sys.stderr.isatty()) as bar:
        result = {"model": model_size, "machine": machine(), "rounds": rounds}
        if torch:  # first, since it is what may be missing
            result["torch"] = compare_with_torch(params, n_head, rounds)
            bar.update()
        result |= measure(encoder, params, n_head, rounds, bar)
        result["start"] = start(model_size, models_dir, rounds)
        n_bytes = sum(w.nbytes for w in matrices(params)) + params["wpe"].nbytes
        result["start"]["peak_over_weights"] = result["start"]["peak_bytes"] / n_bytes
        bar.update()
    print("\n".join(report(result)))
    if json:
        Path(json).write_text(dumps(result, indent=2) + "\n")
    if plot:
        draw(result, plot)


if __name__ == "__main__":
    from command_line import run

    run(main)
