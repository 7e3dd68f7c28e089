"""Hugging Face's layout of a GPT-2: config.json and the weights.

A folder holds `config.json`; the weights in `model.safetensors`, or in shards that `model.safetensors.index.json`
lists; the vocabulary in `tokenizer.json`, or in `vocab.json` and `merges.txt`, which are OpenAI's `encoder.json` and
`vocab.bpe` under other names, with `added_tokens.json`. `tokenizer_config.json` names the special tokens.
Weights are [in, out], as OpenAI's. What transformers' GPT-2 can do and gpt2.py can't is refused by its name.

Formats: https://huggingface.co/docs/safetensors (a length, JSON, bytes); transformers' GPT2Config and GPT2Tokenizer.
"""

import json
import math
import re
import shlex
from itertools import islice

import numpy as np

from encoder import read_object
from errors import DamagedFile

CONFIG, WEIGHTS, INDEX, PICKLE = "config.json", "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"
SIZES = {"n_vocab": "vocab_size", "n_ctx": "n_positions", "n_embd": "n_embd", "n_head": "n_head", "n_layer": "n_layer"}
SETTINGS = {  # what other values would change in the forward pass: key -> values that gpt2.py computes, default first
    "activation_function": ("gelu_new", "gelu_pytorch_tanh", "gelu_fast"),  # three names of the tanh form
    "add_cross_attention": (False,),
    "scale_attn_weights": (True, False),
    "scale_attn_by_inverse_layer_idx": (False, True),
    "reorder_and_upcast_attn": (False, True),  # the order of a product and the precision of float16: none in float32
    "tie_word_embeddings": (True, False),
}
EPSILON = 1e-5  # gpt2.layer_norm's
DTYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}
MASKS = re.compile(r"h\.\d+\.attn\.(?:masked_)?bias")  # buffers that old versions stored


def is_layout_of(folder):
    """Whether the folder looks like Hugging Face's. One that holds OpenAI's hparams.json is OpenAI's."""
    theirs = (CONFIG, WEIGHTS, INDEX, PICKLE)
    return not (folder / "hparams.json").is_file() and any((folder / name).is_file() for name in theirs)


def their_name(name):
    """ "h0/attn/c_attn/w" -> "h.0.attn.c_attn.weight". Names that aren't ours stay as they are."""
    name = re.sub(r"^h(\d+)/", r"h.\1.", name)
    name = re.sub(r"^(w[tp]e)$|/[wg]$", r"\1.weight", name)
    return re.sub(r"/b$", ".bias", name).replace("/", ".")


def load_hparams(folder):
    """{n_vocab, n_ctx, n_embd, n_head, n_layer, n_inner} and the settings of config.json that change the forward pass.

    DamagedFile for a model that isn't a GPT-2, or that gpt2.py can't compute.
    """
    path = folder / CONFIG
    config = read_object(path)
    if config.get("model_type") != "gpt2":
        raise DamagedFile(f"{path}: model_type must be 'gpt2', not {config.get('model_type')!r:.40}")
    if config.get("n_inner") is None:
        config.pop("n_inner", None)
    hparams = {}
    for ours, theirs in (SIZES | ({"n_inner": "n_inner"} if "n_inner" in config else {})).items():
        hparams[ours] = config.get(theirs)
        if type(hparams[ours]) is not int or hparams[ours] < 1:
            raise DamagedFile(f"{path}: {theirs} must be a positive whole number, not {hparams[ours]!r:.40}")
    if hparams["n_embd"] % hparams["n_head"]:
        raise DamagedFile(f"{path}: n_head {hparams['n_head']} doesn't divide n_embd {hparams['n_embd']}")
    for key, values in SETTINGS.items():
        hparams[key] = config.get(key, values[0])
        if hparams[key] not in values:
            known = " or ".join(map(repr, values))
            raise DamagedFile(f"{path}: {key} {hparams[key]!r:.40} isn't supported, only {known}")
    hparams["layer_norm_epsilon"] = epsilon = config.get("layer_norm_epsilon", EPSILON)
    if type(epsilon) is not float or not 0 < epsilon < 1:
        raise DamagedFile(f"{path}: layer_norm_epsilon must be a number between 0 and 1, not {epsilon!r:.40}")
    return hparams


def with_config(params, hparams):
    """params that give, in gpt2.py's one forward pass, what the settings of config.json ask for.

    Another epsilon goes to layer_norm beside g and b, as its argument eps. Another scale of the attention scores is
    one of the queries, which are the first n_embd channels of c_attn.
    """
    eps = (
        {"eps": np.array(hparams["layer_norm_epsilon"], np.float32)} if hparams["layer_norm_epsilon"] != EPSILON else {}
    )
    n_embd, blocks = hparams["n_embd"], []
    for i, block in enumerate(params["blocks"]):
        scale = 1 if hparams["scale_attn_weights"] else math.sqrt(n_embd // hparams["n_head"])
        if hparams["scale_attn_by_inverse_layer_idx"]:
            scale /= i + 1
        c_attn = block["attn"]["c_attn"]
        if scale != 1:
            factors = np.where(np.arange(3 * n_embd) < n_embd, scale, 1).astype(np.float32)
            c_attn = {"w": c_attn["w"] * factors, "b": c_attn["b"] * factors}
        attn = block["attn"] | {"c_attn": c_attn}
        blocks.append(block | {"attn": attn, "ln_1": block["ln_1"] | eps, "ln_2": block["ln_2"] | eps})
    return params | {"blocks": blocks, "ln_f": params["ln_f"] | eps}


def load_weights(folder, names, tied=True):
    """The dict name -> float32 array of all weights, read-only views of the files; bfloat16 and float16 are widened.

    names: an iterator of ours, which theirs are translated to; those that have none keep theirs. tied: whether the
    output matrix may be left out, since it is wte. OSError, DamagedFile for files that are missing or aren't right.
    """
    if (folder / WEIGHTS).is_file():
        stored = read_safetensors(folder / WEIGHTS)
    elif (folder / INDEX).is_file():
        stored = read_shards(folder / INDEX)
    elif (folder / PICKLE).is_file():
        convert = "import sys, transformers as t; t.AutoModelForCausalLM.from_pretrained(sys.argv[1]).save_pretrained("
        raise OSError(
            f"{folder / PICKLE} is a pickle, which can run code as it is read, so it isn't; where you trust it: "
            f"python -c '{convert}sys.argv[1])' {shlex.quote(str(folder))}"
        )
    else:
        raise FileNotFoundError(f"{folder} has neither {WEIGHTS} nor {INDEX}")
    ours = {their_name(name): name for name in islice(names, len(stored))}  # whatever n_layer claims
    weights = {}
    for name, (dtype, array) in stored.items():
        name = name.removeprefix("transformer.")
        if MASKS.fullmatch(name):
            continue
        if dtype not in DTYPES:
            raise DamagedFile(f"{folder}: {name} is of type {dtype}, where weights are F32, F16 or BF16")
        if ours.get(name, name) in weights:
            raise DamagedFile(f"{folder}: {name} is there twice, with and without 'transformer.'")
        weights[ours.get(name, name)] = widen(dtype, array)
    head = weights.pop("lm_head.weight", None)
    if head is None and not tied:
        raise DamagedFile(f"{folder}: lm_head.weight is missing, and tie_word_embeddings in {CONFIG} is false")
    if head is not None and not np.array_equal(head, weights.get("wte")):
        raise DamagedFile(f"{folder}: lm_head.weight differs from wte.weight; GPT-2 has one matrix for both")
    return weights


def widen(dtype, array):
    if dtype == "BF16":
        array = (array.astype(np.uint32) << 16).view(np.float32)  # it is the upper half of a float32
    array = np.require(array, np.float32, "A")  # a copy if the file has it at an odd address
    array.flags.writeable = False
    return array


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
        content = np.asarray(np.memmap(path, np.uint8, "r"))  # arithmetic on plain arrays is faster than on memmaps
        start = 8 + int.from_bytes(content[:8].tobytes(), "little")
        header = json.loads(content[8:start].tobytes())
        header.pop("__metadata__", None)
        tensors = {}
        for name, entry in header.items():
            first, last = entry["data_offsets"]
            array = content[start + first : start + last]
            if entry["dtype"] in DTYPES:
                array = array.view(DTYPES[entry["dtype"]]).reshape(entry["shape"])
            tensors[name] = entry["dtype"], array
        return tensors
    except (safetensors.SafetensorError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise DamagedFile(f"{path} isn't a safetensors file, or is damaged: {str(error)[:200]}") from None


def import_safetensors():
    try:
        import safetensors
    except ImportError:
        raise OSError("Hugging Face's layout needs one more package: pip install safetensors") from None
    return safetensors
