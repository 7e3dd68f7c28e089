"""Hugging Face's layout of a GPT-2: config.json and the weights.

A folder holds `config.json`; `generation_config.json`, if it is there, with the ids at which a text begins and ends;
the weights in `model.safetensors`, or in shards that `model.safetensors.index.json` lists; and a tokenizer
(huggingface_tokenizer.py). Weights are [in, out], as OpenAI's. What transformers' GPT-2 can do and gpt2.py can't is
refused by its name. Where versions of transformers differ, 5.24 is followed.

Formats: https://huggingface.co/docs/safetensors (a length, JSON, bytes); transformers' GPT2Config.
"""

import json
import math
import re
import shlex
from itertools import islice

import numpy as np

from encoder import read_object
from errors import DamagedFile
from model_files.checkpoint import map_file, widen

CONFIG, GENERATION, WEIGHTS = "config.json", "generation_config.json", "model.safetensors"
INDEX, PICKLE = "model.safetensors.index.json", "pytorch_model.bin"
SIZES = {"n_vocab": "vocab_size", "n_ctx": "n_positions", "n_embd": "n_embd", "n_head": "n_head", "n_layer": "n_layer"}
DEFAULT_SIZES = {"vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12}  # GPT2Config's
OTHER_NAMES = {  # of the same sizes; transformers reads both
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}
TANH_FORM = ("gelu_new", "gelu_pytorch_tanh", "gelu_python_tanh", "gelu_fast", "gelu_accurate")  # all the same formula
SETTINGS = {  # what other values would change in the forward pass: key -> values that gpt2.py computes, default first
    "activation_function": TANH_FORM,
    "add_cross_attention": (False,),
    "scale_attn_weights": (True, False),
    "scale_attn_by_inverse_layer_idx": (False, True),
    "reorder_and_upcast_attn": (False, True),  # the order of a product and the precision of float16: none in float32
    "tie_word_embeddings": (True, False),
}
EPSILON = 1e-5  # gpt2.layer_norm's
DTYPES = {"F32": ("<f4", "float32"), "F16": ("<f2", "float16"), "BF16": ("<u2", "bfloat16")}  # stored, its name


def is_layout_of(folder):
    """Whether the folder looks like Hugging Face's. One that holds OpenAI's hparams.json is OpenAI's."""
    theirs = (CONFIG, WEIGHTS, INDEX, PICKLE, f"{PICKLE}.index.json")
    return not (folder / "hparams.json").is_file() and any((folder / name).is_file() for name in theirs)


def their_name(name):
    """ "h0/attn/c_attn/w" -> "h.0.attn.c_attn.weight". Names that aren't ours stay as they are."""
    name = re.sub(r"^h(\d+)/", r"h.\1.", name)
    name = re.sub(r"^(w[tp]e)$|/[wg]$", r"\1.weight", name)
    return re.sub(r"/b$", ".bias", name).replace("/", ".")


def load_hparams(folder):
    """{n_vocab, n_ctx, n_embd, n_head, n_layer, n_inner}, unchecked, and what else of config.json the model depends on.

    That is the keys of SETTINGS, layer_norm_epsilon, and what `load_ids` finds. DamagedFile for a model that isn't a
    GPT-2, or that gpt2.py can't compute.
    """
    path = folder / CONFIG
    config = read_object(path)
    config = {OTHER_NAMES[key]: config[key] for key in OTHER_NAMES if key in config} | config
    architectures = config.get("architectures")  # the first versions' files lack model_type, and some this one, too
    known = "GPT2" in str(architectures) or not architectures and config.keys() >= DEFAULT_SIZES.keys()
    if (config.get("model_type") or ("gpt2" if known else None)) != "gpt2":
        raise DamagedFile(f"{path}: model_type must be 'gpt2', not {config.get('model_type')!r:.40}")
    hparams = {ours: (DEFAULT_SIZES | config)[theirs] for ours, theirs in SIZES.items()}
    if config.get("n_inner") is not None:
        hparams["n_inner"] = config["n_inner"]
    for key, values in SETTINGS.items():
        hparams[key] = config.get(key, values[0])
        if hparams[key] not in values:
            known = " or ".join(map(repr, values))
            raise DamagedFile(f"{path}: {key} {hparams[key]!r:.40} isn't supported, only {known}")
    hparams["layer_norm_epsilon"] = epsilon = config.get("layer_norm_epsilon", EPSILON)
    if type(epsilon) is not float or not 0 < epsilon < 1:
        raise DamagedFile(f"{path}: layer_norm_epsilon must be a number between 0 and 1, not {epsilon!r:.40}")
    return hparams | load_ids(folder)


def load_ids(folder):
    """{bos_token_id, eos_token_ids}: an id or None, and a tuple of ids, those at which a text begins and ends.

    As transformers' generate() does, from generation_config.json if that is there, else from config.json.
    """
    path = folder / (GENERATION if (folder / GENERATION).is_file() else CONFIG)
    config = read_object(path)
    begin, ends = config.get("bos_token_id"), config.get("eos_token_id")
    ends = ends if isinstance(ends, list) else [ends]
    for key, ids in (("bos_token_id", [begin]), ("eos_token_id", ends)):
        if not {type(i) for i in ids} <= {int, type(None)}:
            raise DamagedFile(f"{path}: {key} must be a token's id, not {config[key]!r:.40}")
    return {"bos_token_id": begin, "eos_token_ids": tuple(i for i in ends if i is not None)}


def with_config(params, hparams):
    """params that give, in gpt2.py's one forward pass, what the settings of config.json ask for.

    Another epsilon goes to layer_norm beside g and b, as its argument eps. Another scale of the attention scores is
    one of the queries, which are the first n_embd channels of c_attn.
    """
    epsilon, n_embd, blocks = hparams["layer_norm_epsilon"], hparams["n_embd"], []
    eps = {"eps": np.array(epsilon, np.float32)} if epsilon != EPSILON else {}
    for i, block in enumerate(params["blocks"]):
        scale = 1 if hparams["scale_attn_weights"] else math.sqrt(n_embd // hparams["n_head"])
        if hparams["scale_attn_by_inverse_layer_idx"]:
            scale /= i + 1
        c_attn = block["attn"]["c_attn"]
        if scale != 1:
            factors = np.where(np.arange(3 * n_embd) < n_embd, scale, 1).astype(np.float32)  # [3*n_embd]
            c_attn = {"w": c_attn["w"] * factors, "b": c_attn["b"] * factors}
        attn = block["attn"] | {"c_attn": c_attn}
        blocks.append(block | {"attn": attn, "ln_1": block["ln_1"] | eps, "ln_2": block["ln_2"] | eps})
    return params | {"blocks": blocks, "ln_f": params["ln_f"] | eps}


def load_weights(folder, names, tied=True):
    """The dict name -> float32 array of the weights, read-only, and their names of what else is there.

    names: an iterator of ours. tied: whether the output matrix is wte; then either name will do. Heads for other tasks,
    and masks that old versions stored, are not read. OSError, DamagedFile for files that are missing or aren't right.
    """
    stored = read_tensors(folder)
    ours = {their_name(name): name for name in islice(names, len(stored))} | {"lm_head.weight": "lm_head"}
    weights, unused = {}, []
    for name, (dtype, array) in stored.items():
        name = name.removeprefix("transformer.")
        if name not in ours:
            unused.append(name)
        elif dtype not in DTYPES:
            raise DamagedFile(f"{folder}: {name} is of type {dtype}, where weights are F32, F16 or BF16")
        elif ours[name] in weights:
            raise DamagedFile(f"{folder}: {name} is there twice, with and without 'transformer.'")
        else:
            weights[ours[name]] = widen(array, DTYPES[dtype][1])
    head = weights.pop("lm_head", None)
    if head is None and not tied:
        raise DamagedFile(f"{folder}: lm_head.weight is missing, and tie_word_embeddings in {CONFIG} is false")
    if head is not None and tied:
        weights.setdefault("wte", head)
    if head is not None and "wte" in weights and not np.array_equal(head, weights["wte"]):
        raise DamagedFile(f"{folder}: lm_head.weight differs from wte.weight; GPT-2 has one matrix for both")
    return weights, unused


def read_tensors(folder):
    """The dict name -> (dtype, array) of all weights that a folder holds. OSError, DamagedFile."""
    if (folder / WEIGHTS).is_file():
        return read_safetensors(folder / WEIGHTS)
    if (folder / INDEX).is_file():
        return read_shards(folder / INDEX)
    for name in (PICKLE, f"{PICKLE}.index.json"):
        if (folder / name).is_file():
            convert = (
                "import sys, transformers as t; t.AutoModelForCausalLM.from_pretrained(sys.argv[1]).save_pretrained("
            )
            raise OSError(
                f"{folder / name} is a pickle, which can run code as it is read, so it isn't; where you trust it: "
                f"python -c '{convert}sys.argv[1])' {shlex.quote(str(folder))}"
            )
    raise FileNotFoundError(f"{folder} has neither {WEIGHTS} nor {INDEX}")


def read_shards(path):
    """The dict name -> (dtype, array) of what an index lists, from the files that it names."""
    places = read_object(path).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
        raise DamagedFile(f"{path} has no weight_map from names to files")
    shards = {}
    for file in sorted(set(places.values())):
        if not re.fullmatch(r"[\w-][\w.-]*", file):  # a name, not a path that leads elsewhere
            raise DamagedFile(f"{path} names a shard {file[:80]!r}, which isn't a file beside it")
        shards[file] = read_safetensors(path.with_name(file))
    for name, file in places.items():
        if name not in shards[file]:
            raise DamagedFile(f"{path.with_name(file)} lacks {name[:80]!r}, which {path.name} says it holds")
    return {name: shards[file][name] for name, file in places.items()}


def read_safetensors(path):
    """The dict name -> (dtype, array) of a file, views of a memory map: BF16 as its bits, strange types as bytes.

    safetensors checks the file: sizes against shapes, no byte twice and none outside. The arrays that it would make for
    NumPy are copies, so their places are read from the same header again, now known to be right.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing")
    safetensors = import_safetensors()
    try:
        with safetensors.safe_open(path, "np"):
            pass
        content = map_file(path)
        start = 8 + int.from_bytes(content[:8].tobytes(), "little")
        header = json.loads(content[8:start].tobytes())
        header.pop("__metadata__", None)
        tensors = {}
        for name, entry in header.items():
            first, last = entry["data_offsets"]
            array = content[start + first : start + last]
            if entry["dtype"] in DTYPES:
                array = array.view(DTYPES[entry["dtype"]][0]).reshape(entry["shape"])
            tensors[name] = entry["dtype"], array
        return tensors
    except (safetensors.SafetensorError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise DamagedFile(f"{path} isn't a safetensors file, or is damaged: {str(error)[:200]}") from None


def import_safetensors():
    try:
        import safetensors  # an optional package, asked for where it is needed
    except ImportError:
        raise OSError("Hugging Face's layout needs one more package: pip install safetensors") from None
    return safetensors
