"""Folders in Hugging Face's layout for the tests."""

import contextlib
import io
import itertools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import safetensors.numpy
from tiny import random_tokens

import gpt2
import gpt2_kvcache
import utils
from model_files import huggingface
from utils import load_encoder_hparams_and_params

GOLDEN = Path(__file__).parent / "golden" / "huggingface"
MODELS = ("sharded", "bf16", "settings")  # written by transformers: tests/make_huggingface_golden.py


def load(folder):
    return load_encoder_hparams_and_params(folder.name, folder.parent)


def logits(params, n_head, n_vocab=377):
    return gpt2.gpt2(random_tokens(16, n_vocab), **params, n_head=n_head)


def edit(path, **changes):
    """Changes keys of a JSON file; None takes one out."""
    content = (json.loads(path.read_text()) if path.exists() else {}) | changes
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def stored(folder):
    """name -> float32 array of a golden model in one file, by the safetensors package."""
    return safetensors.numpy.load_file(folder / "model.safetensors")


# What a folder gives: read here by us, by compare_huggingface_folders.ask by transformers

PROMPT, N_NEW = "Once", 8


def read(folder, texts):
    """What is read from a folder, see the keys; None for a text with a token that the model lacks."""
    with contextlib.redirect_stderr(io.StringIO()):
        encoder, hparams, params = utils.load_model(folder)
    n_head = hparams["n_head"]

    def ids_of(text, encode=encoder.encode):
        try:
            return encode(text)
        except ValueError:
            return None

    def greedy(ids):
        return ids and gpt2_kvcache.generate(ids, params, n_head, N_NEW, end_of_text=encoder.end_of_text)

    prompt, encoded = ids_of(PROMPT, encoder.encode_prompt), [ids_of(text) for text in texts]
    new = [greedy(prompt), greedy(ids_of("", encoder.encode_prompt))]
    return {
        "ids": encoded,
        "decoded": [None if ids is None else encoder.decode(ids) for ids in encoded],
        "pieces": [encoder.decode([i]) for i in range(300, hparams["n_vocab"])],
        "logits": prompt and gpt2.gpt2(prompt, **params, n_head=n_head)[-1, ::21],
        "new": new,  # greedy, of a prompt and of none
        "text": [None if ids is None else encoder.decode(ids) for ids in new],
    }


def outcome(function, *arguments):
    """What it returns, or its error as a text."""
    try:
        return function(*arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def difference(theirs, ours):
    """What differs, "" if nothing. Both are from `read` or `ask`, or the errors of who refused."""
    if isinstance(theirs, str) or isinstance(ours, str):
        return "" if type(theirs) is type(ours) else str(theirs if isinstance(theirs, str) else ours)
    for key, expected in theirs.items():
        found, left = ours[key], [ids is not None for ids in theirs["ids"]]
        if key == "decoded":  # transformers decodes what a model lacks, too
            expected, found = (list(itertools.compress(texts, left)) for texts in (expected, found))
        if key == "logits" and expected is not None and found is not None:
            expected, found = np.abs(np.asarray(expected) - found).max() < 1e-4, True
        if expected != found:
            return f"{key}: {expected} and {found}"
    return ""


# Folders drawn at random: the same for a seed on every machine. compare_huggingface_folders.py asks transformers.

MERGES = (utils.BUNDLED / "vocab.bpe").read_text(encoding="utf-8").split("\n")[1:-1]
BYTES = [piece for piece in json.loads((utils.BUNDLED / "encoder.json").read_text(encoding="utf-8"))][:256]
IN_VOCABULARY = ("</s>", "<pad>", "[SEP]", "<|конец|>", "<|fin_été|>", "<|đem|>", "<|new line|>", "zzz")
ADDED = ("<pad>", "<|im_end|>", "New York", "<x>", "<x>y", " two", "cat", "<|я|>", "\n\n", "<sep>", "</s>", "!")
PARTS = (
    "the king",
    " there was",
    "Once upon a time",
    "  ",
    " ",
    "\n",
    "\t",
    "\u00a0",
    "é",
    "中",
    "👑",
    "'s",
    "12",
    "q",
)
HEADS = {"score.weight": (2, 3), "multiple_choice_head.summary.weight": (1, 3), "h.0.attn.bias": (1, 1, 4, 4)}


def draw(seed, folder):
    """Writes a folder as old or new versions of transformers, or people, might have written it."""
    rng = random.Random(seed)
    folder.mkdir(parents=True)
    ids, merges = draw_vocabulary(rng)
    added = [draw_added(rng, text) for text in rng.sample(ADDED, rng.choice((0, 1, 2, 4)))]
    n_tokens = draw_tokenizer(rng, folder, ids, merges, added)
    n_vocab = {"padded": -(-n_tokens // 64) * 64, "short": n_tokens - 2, "exact": n_tokens}[
        rng.choice(("padded", "short", "exact", "exact"))
    ]
    ends = draw_config(rng, folder, n_vocab)
    draw_weights(rng, folder, ends)


def texts(seed, n=24):
    """Texts that use the tokens of such folders in all positions."""
    rng, parts = random.Random(seed), PARTS + ADDED + IN_VOCABULARY + ("<|endoftext|>", "<new>")
    return ["", "Once upon", *("".join(rng.choices(parts, k=rng.randint(1, 7))) for _ in range(n - 2))]


def draw_vocabulary(rng):
    """(ids, merges): bytes and merges, and special tokens at either end; sometimes with holes, or without a byte."""
    merges = MERGES[: rng.randint(20, 120)]
    pieces = list(dict.fromkeys([*BYTES, *(merge.replace(" ", "") for merge in merges)]))
    if rng.random() < 0.1:
        pieces.remove("q")
    for special in [*rng.sample(IN_VOCABULARY, rng.choice((0, 0, 1, 3))), *["<|endoftext|>"] * (rng.random() < 0.8)]:
        pieces.insert(rng.choice((0, len(pieces))), special)
    hole, width = rng.randrange(len(pieces)), rng.choice((0, 0, 0, 1, 3))
    return {piece: i + width * (i > hole) for i, piece in enumerate(pieces)}, merges


def draw_added(rng, text):
    flags = {flag: True for flag in ("lstrip", "rstrip", "single_word") if rng.random() < 0.15}
    special = rng.random() < 0.5
    flags |= rng.choice(({}, {"special": special}, {"special": special, "normalized": rng.random() < 0.5}))
    return {"content": text, **dict.fromkeys(("lstrip", "rstrip", "single_word"), False), **flags}


def draw_tokenizer(rng, folder, ids, merges, added):
    """Writes the tokenizer's files. -> about how many tokens it has."""
    form, listed = rng.choice(("slow", "fast", "both")), rng.choice(("decoder", "old", "old"))
    number = max(ids.values()) + 1
    numbered = {}
    for token in added:
        numbered[number] = token
        number += rng.choice((1, 1, 1, 3))
    choices = ["<|endoftext|>", "<new>", *(token["content"] for token in added), *(ids.keys() & {*IN_VOCABULARY})]
    choices = sorted(choices)
    names = {f"{name}_token": rng.choice(choices) for name in ("bos", "eos", "unk", "pad", "sep") if rng.random() < 0.5}
    config, old = {"model_max_length": 64}, {}
    if rng.random() < 0.3:
        config["add_prefix_space"] = rng.random() < 0.5
    if rng.random() < 0.2:
        config[rng.choice(("add_bos_token", "add_eos_token"))] = True
    config["tokenizer_class"] = rng.choice(
        ["GPT2Tokenizer", "GPT2TokenizerFast"] + ["PreTrainedTokenizerFast"] * (form != "slow")
    )
    for name, text in names.items():
        style = rng.choice(("text", "typed", "map", "map with flags"))
        flags = {
            "content": text,
            "lstrip": rng.random() < 0.1,
            "rstrip": False,
            "single_word": False,
            "normalized": rng.random() < 0.5,
        }
        place = old if style.startswith("map") else config
        place[name] = text if style in ("text", "map") else flags if place is old else {"__type": "AddedToken", **flags}
    for name in rng.sample(("bos_token", "eos_token", "unk_token"), rng.choice((0, 0, 0, 1))):
        config[name] = None
    if rng.random() < 0.4:
        key = rng.choice(("additional_special_tokens", "extra_special_tokens"))
        rng.choice((config, old))[key] = rng.sample(choices, min(2, len(choices)))
    if listed == "decoder":
        config["added_tokens_decoder"] = {str(i): token for i, token in numbered.items()}
    elif numbered and form != "fast":
        put_json(folder / "added_tokens.json", {token["content"]: i for i, token in numbered.items()})
    if old:
        put_json(folder / "special_tokens_map.json", old)
    if rng.random() < 0.9 or "added_tokens_decoder" in config:
        put_json(folder / "tokenizer_config.json", config)
    if form != "fast":
        put_json(folder / "vocab.json", ids)
        (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]), encoding="utf-8")
    if form != "slow":
        put_json(folder / "tokenizer.json", draw_fast(rng, ids, merges, numbered))
    return number + rng.choice((0, 1, 2))


def draw_fast(rng, ids, merges, numbered):
    """The content of tokenizer.json."""
    listed = {ids[text]: draw_added(rng, text) for text in sorted(ids.keys() & {*IN_VOCABULARY, "<|endoftext|>"})}
    default = {"special": False, "normalized": True}
    added = [{"id": i, **default, **token} for i, token in sorted((listed | numbered).items())]
    model = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None}
    model |= {"end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "vocab": ids}
    model["merges"] = merges if rng.random() < 0.5 else [merge.split(" ") for merge in merges]
    level = {"type": "ByteLevel", "add_prefix_space": rng.random() < 0.2, "trim_offsets": True, "use_regex": True}
    first = rng.choice(sorted(ids))
    sequence = {"Sequence": {"id": "A", "type_id": 0}}
    special = {"SpecialToken": {"id": first, "type_id": 0}}
    template = {
        "type": "TemplateProcessing",
        "single": rng.choice(([sequence], [special, sequence], [sequence, special], [special, sequence, special])),
        "pair": [sequence, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {first: {"id": first, "ids": [ids[first]], "tokens": [first]}},
    }
    after = rng.choice((None, level, template, {"type": "Sequence", "processors": [level, template]}))
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": after,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": model,
    }


def draw_config(rng, folder, n_vocab):
    """Writes config.json, and generation_config.json or not. -> ids at which a text may end."""
    n_head = rng.choice((1, 2, 3))
    sizes = {"vocab_size": n_vocab, "n_positions": rng.choice((16, 24)), "n_head": n_head}
    sizes |= {"n_embd": n_head * rng.choice((1, 4, 5)), "n_layer": rng.choice((1, 2, 3))}
    if rng.random() < 0.2:
        sizes["hidden_size"], sizes["num_hidden_layers"] = sizes.pop("n_embd"), sizes.pop("n_layer")
    config = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", **sizes}
    for key, values in (
        ("layer_norm_epsilon", (1e-5, 0.03)),
        ("activation_function", ("gelu_new", "gelu_pytorch_tanh", "gelu_accurate", "gelu_python_tanh", "gelu_fast")),
        ("scale_attn_weights", (True, False)),
        ("scale_attn_by_inverse_layer_idx", (False, True)),
        ("n_inner", (None, 7)),
    ):
        if rng.random() < 0.4:
            config[key] = rng.choice(values)
    if rng.random() < 0.2:
        del config[rng.choice(("architectures", "model_type"))]
    hot = rng.sample(range(n_vocab), 6)
    kinds = (None, 50256, hot[0], hot[0], hot[:2], hot[:3])
    if rng.random() < 0.8:
        config["eos_token_id"] = rng.choice(kinds)
    if rng.random() < 0.8:
        config["bos_token_id"] = rng.choice((None, 50256, hot[4], hot[5]))
    put_json(folder / "config.json", config)
    if rng.random() < 0.5:
        generation = {"_from_model_config": True, "transformers_version": "4.30.0"}
        for key, values in (("eos_token_id", kinds), ("bos_token_id", (None, hot[4], hot[5]))):
            if rng.random() < 0.8:
                generation[key] = rng.choice(values)
        put_json(folder / "generation_config.json", generation)
    return hot


def draw_weights(rng, folder, hot):
    """Writes the weights of a folder's config.json: some type, one file or shards, the tied matrix under any name."""
    hparams = huggingface.load_hparams(folder)
    normal = np.random.default_rng(rng.randrange(2**32)).standard_normal
    weights = {}
    for name, shape in utils.tensors(hparams):
        weights[huggingface.their_name(name)] = normal(shape, np.float32) * np.float32(0.3) + ("/g" in name)
    weights["wte.weight"][hot] *= 3  # so that the model tends to end texts, if these are ends
    prefix = rng.choice(("", "transformer."))
    weights = {prefix + name: array for name, array in weights.items()}
    tied = rng.choice(("wte", "wte", "lm_head", "both"))
    if tied != "wte":
        weights["lm_head.weight"] = weights[f"{prefix}wte.weight"]
    if tied == "lm_head":
        del weights[f"{prefix}wte.weight"]
    for name in rng.sample(sorted(HEADS), rng.choice((0, 0, 0, 1, 3))):
        weights[name] = normal(HEADS[name], np.float32)
    dtype = rng.choice(("F32", "F32", "F16", "BF16"))
    n_shards = rng.choice((1, 1, 2, 3))
    names = sorted(weights)
    shards = [names[i::n_shards] for i in range(n_shards)]
    files = [f"model-{i + 1:05}-of-{n_shards:05}.safetensors" for i in range(n_shards)]
    if n_shards == 1:
        files = ["model.safetensors"]
    else:
        places = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
        put_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": places})
    for file, shard in zip(files, shards, strict=True):
        put_safetensors(folder / file, {name: weights[name] for name in shard}, dtype)


def put_safetensors(path, weights, dtype="F32"):
    """A file of float32 arrays as F32, F16 or BF16 (cut off, not rounded)."""
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for name, array in weights.items():
        array = np.ascontiguousarray(array, np.float32)
        upper = array.view("<u2").reshape(*array.shape, 2)[..., 1] if dtype == "BF16" else None
        content = {"F32": array, "F16": array.astype("<f2"), "BF16": upper}[dtype].tobytes()
        header[name] = {"dtype": dtype, "shape": array.shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def put_json(path, content):
    path.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")


# Cases of their own, each a change of one plain folder

PIECES = [*BYTES, *(merge.replace(" ", "") for merge in MERGES[:60]), "<|endoftext|>"]
END, NEW = len(PIECES) - 1, len(PIECES)  # the ids of "<|endoftext|>" and of the first token that is added
LISTED = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False, "special": True}


class Case(NamedTuple):
    files: dict = {}  # name -> keys to change, or the whole content as a text
    n_vocab: int = NEW
    favourite: int = None  # a token that the model writes whatever was before
    weights: Callable = dict  # name -> array to the same, changed
    texts: tuple = ("the king", "<|endoftext|>", "a<|endoftext|> the", "")


def write_case(name, folder):
    """Writes the folder of one of CASES and returns it."""
    folder.mkdir(parents=True)
    case = CASES[name]
    put_json(folder / "vocab.json", {piece: i for i, piece in enumerate(PIECES)})
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *MERGES[:60], ""]), encoding="utf-8")
    config = {"model_type": "gpt2", "vocab_size": case.n_vocab, "n_positions": 16, "n_embd": 12, "n_head": 3}
    put_json(folder / "config.json", config | {"n_layer": 2})
    for file, content in case.files.items():
        if isinstance(content, str):
            (folder / file).write_text(content, encoding="utf-8")
        else:
            edit(folder / file, **content)
    rng, weights = np.random.default_rng(0), {}
    for ours, shape in utils.tensors(huggingface.load_hparams(folder)):
        array = rng.standard_normal(shape, np.float32) * np.float32(0.3) + ("/g" in ours)
        weights["transformer." + huggingface.their_name(ours)] = array
    if case.favourite is not None:
        weights["transformer.ln_f.bias"][:] = 1
        weights["transformer.wte.weight"][case.favourite] = 3
    put_safetensors(folder / "model.safetensors", case.weights(weights))
    return folder


def under_lm_head(weights):
    return {"lm_head.weight" if "wte" in name else name: array for name, array in weights.items()}


def with_both_names(weights):
    return weights | {"lm_head.weight": weights["transformer.wte.weight"]}


def with_heads(weights):
    unused = {**HEADS, "transformer.h.1.attn.masked_bias": (1,), "transformer.h.2.ln_1.bias": (12,), "v_head.0.b": (1,)}
    return weights | {name: np.zeros(shape) for name, shape in unused.items()}


def settings(**keys):
    return {"tokenizer_config.json": keys}


def ends(**keys):
    """<|konec|> is an added token, which the files say ends a text."""
    return {"added_tokens.json": {"<|konec|>": NEW}, **keys}


def in_vocabulary(text, **flags):
    """A special token in the vocabulary itself, which the model likes to write."""
    listed = {str(NEW): {"content": text, **LISTED, **flags}}
    files = {"vocab.json": {text: NEW}} | settings(added_tokens_decoder=listed)
    return Case(files, NEW + 1, NEW, texts=(text, f"a{text}a", f"a {text} {text}b{text}"))


def tokenizer_json(**changes):
    """The same vocabulary as tokenizer.json; the other files go."""
    rng = random.Random(0)
    content = draw_fast(rng, {piece: i for i, piece in enumerate(PIECES)}, MERGES[:60], {})
    plain = {"pre_tokenizer": PREFIX | {"add_prefix_space": False}, "post_processor": None}
    return {"tokenizer.json": json.dumps(content | plain | changes)}


TEMPLATE = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "x", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {"x": {"id": "x", "ids": [END, 5], "tokens": ["x", "y"]}},
}
PREFIX = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
KONEC, STRIPPED = ("a<|konec|>", "<pad><sep>", "<sep>"), ("a  <s>  b<s>", "<s> <s>", "cat cats, cat", "\n<s>\x85 x")
PAD = settings(pad_token="<pad>")
CASES = {
    "the tied matrix is stored as lm_head alone": Case(weights=under_lm_head),
    "the tied matrix is stored twice": Case(weights=with_both_names),
    "heads, buffers and a block too many": Case(weights=with_heads),
    "a config of 2019 without model_type": Case({"config.json": {"model_type": None, "n_ctx": 16}}),
    "an architecture in place of model_type": Case(
        {"config.json": {"model_type": None, "architectures": ["GPT2Model"]}}
    ),
    "sizes under other names": Case(
        {"config.json": {"n_embd": None, "hidden_size": 12, "n_head": None, "num_attention_heads": 3}}
    ),
    "sizes of one": Case({"config.json": {"n_embd": 1, "n_head": 1, "n_layer": 1, "n_inner": 1}}),
    "rows that only pad": Case(n_vocab=NEW // 64 * 64 + 64, favourite=NEW + 1),
    "a pad token without a row": Case(PAD, texts=("the king", "a<pad>", "<pad>")),
    "a pad token with a row": Case(PAD, NEW + 1, NEW, texts=("the king", "a<pad>", "<pad>")),
    "cyrillic letters in a special token": in_vocabulary("<|конец|>"),
    "letters that mean bytes in a special token": in_vocabulary("<|fin_été|>"),
    "a letter that means a control character": in_vocabulary("<|đem|>"),
    "a space in a special token": in_vocabulary("<|new line|>", normalized=True),
    "a special token that no file lists": Case({"vocab.json": {"<|конец|>": NEW}}, NEW + 1, NEW, texts=("<|конец|>",)),
    "the end in config.json": Case(ends(**{"config.json": {"eos_token_id": NEW}}), NEW + 1, NEW, texts=KONEC),
    "the end in special_tokens_map.json": Case(
        ends(**{"special_tokens_map.json": {"eos_token": "<|konec|>"}}), NEW + 1, NEW, texts=KONEC
    ),
    "the end in special_tokens_map.json with its flags": Case(
        ends(**{"special_tokens_map.json": {"eos_token": {"content": "<|konec|>", **LISTED}}}),
        NEW + 1,
        NEW,
        texts=KONEC,
    ),
    "the end in tokenizer_config.json": Case(ends(**settings(eos_token="<|konec|>")), NEW + 1, NEW, texts=KONEC),
    "the end in tokenizer_config.json with its flags": Case(
        settings(eos_token={"__type": "AddedToken", "content": "<|konec|>", **LISTED}), NEW + 1, NEW, texts=KONEC
    ),
    "several ends in generation_config.json": Case(
        ends(**{"generation_config.json": {"eos_token_id": [3, NEW]}, "config.json": {"eos_token_id": 4}}), NEW + 1, NEW
    ),
    "generation_config.json goes before config.json": Case(
        ends(**{"generation_config.json": {"eos_token_id": 3}, "config.json": {"eos_token_id": NEW}}), NEW + 1, NEW
    ),
    "config.json goes before the tokenizer": Case({"config.json": {"eos_token_id": 3}}, favourite=END),
    "an end beyond the vocabulary is none": Case({"config.json": {"eos_token_id": 50256}}, favourite=END),
    "a vocabulary without an end": Case(
        {"vocab.json": {"<|endoftext|>": None, "</s>": END}, "config.json": {"eos_token_id": END}}, favourite=END
    ),
    "the beginning in config.json": Case({"config.json": {"bos_token_id": 29, "eos_token_id": END}}),
    "the beginning in generation_config.json": Case(
        {"config.json": {"bos_token_id": 29}, "generation_config.json": {"bos_token_id": 75, "eos_token_id": END}}
    ),
    "the beginning in tokenizer_config.json": Case(settings(bos_token=PIECES[49])),
    "no beginning": Case({"tokenizer_config.json": '{"bos_token": null}'}),
    "a hole in the ids": Case({"added_tokens.json": {"<pad>": NEW, "<sep>": NEW + 3}}, NEW + 4, NEW + 1, texts=KONEC),
    "a hole in the vocabulary": Case(
        {"vocab.json": {"zzz": NEW + 9}, "added_tokens.json": {"<pad>": 0, "<sep>": 1}}, NEW + 12, NEW + 2, texts=KONEC
    ),
    "a vocabulary without a byte": Case({"vocab.json": {"q": None}}, texts=("quick the queen", "qqq")),
    "a space before every text": Case(
        settings(add_prefix_space=True), texts=("the", " the", "\nthe", "a<|endoftext|>b", "")
    ),
    "a token before and after every text": Case(settings(add_bos_token=True, add_eos_token=True)),
    "one token with two sets of flags": Case(
        {"special_tokens_map.json": {"eos_token": {"content": "<|endoftext|>", **LISTED, "lstrip": True}}},
        texts=("a <|endoftext|>", "\t<|endoftext|> <|endoftext|>"),
    ),
    "special tokens are split": Case(settings(split_special_tokens=True)),
    "names of one's own": Case(
        settings(image_token="<img>", extra_special_tokens=["<e>"], additional_special_tokens=["<a>"]),
        texts=("<img>", "<e>", "<a>"),
    ),
    "white space and words beside a token": Case(
        settings(
            added_tokens_decoder={
                "0": {"content": "<s>", "lstrip": True, "rstrip": True},
                "1": {"content": "cat", "single_word": True},
            }
        ),
        NEW + 2,
        texts=STRIPPED,
    ),
    "tokenizer.json with a template": Case(tokenizer_json(post_processor=TEMPLATE)),
    "tokenizer.json with a sequence of processors": Case(
        tokenizer_json(post_processor={"type": "Sequence", "processors": [PREFIX, TEMPLATE]})
    ),
    "tokenizer.json with a prefix space, which GPT2Tokenizer ignores": Case(tokenizer_json(pre_tokenizer=PREFIX)),
    "tokenizer.json as it stands": Case(
        tokenizer_json(pre_tokenizer=PREFIX) | settings(tokenizer_class="PreTrainedTokenizerFast", bos_token=PIECES[49])
    ),
}
