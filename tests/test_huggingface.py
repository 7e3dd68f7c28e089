"""Weights and config.json are read as transformers reads them, or refused in one line."""

import json
import shutil
import sys

import numpy as np
import pytest
import safetensors.numpy
from folders import CASES, GOLDEN, MODELS, difference, draw, edit, load, logits, read, stored, texts, write_case
from tiny import arrays, random_tokens

import gpt2_kvcache
import utils
from errors import DamagedFile
from export import export

ANSWERS = json.loads(
    (GOLDEN / "answers.json").read_text("utf-8")
)  # transformers': compare_huggingface_folders.py golden


def header_of(path):
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    return json.loads(content[8:end]), content[end:]


def put(path, header, data):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_those_of_transformers(name):
    _, hparams, params = load(GOLDEN / name)
    with np.load(GOLDEN / "logits.npz") as golden:
        expected = golden[name]
    assert np.abs(logits(params, hparams["n_head"]) - expected).max() < 1e-4
    cached, _ = gpt2_kvcache.gpt2(random_tokens(16, 377), **params, n_head=hparams["n_head"])
    assert np.abs(cached - expected).max() < 1e-4


def test_bfloat16_is_widened_bit_for_bit():
    _, _, params = load(GOLDEN / "bf16")
    header, data = header_of(GOLDEN / "bf16" / "model.safetensors")
    start, end = header["transformer.h.1.mlp.c_fc.weight"]["data_offsets"]
    bits = np.frombuffer(data[start:end], "<u2").reshape(12, 20)
    assert np.array_equal(params["blocks"][1]["mlp"]["c_fc"]["w"].view(np.uint32), bits.astype(np.uint32) << 16)


def test_weights_are_read_only_views_of_the_file_in_float32():
    _, _, params = load(GOLDEN / "sharded")
    assert {(a.dtype, a.flags.writeable) for a in arrays(params)} == {(np.dtype("float32"), False)}
    for array in arrays(params):
        while isinstance(array, np.ndarray) and array.base is not None:
            array = array.base
        assert type(array).__name__ == "mmap"


@pytest.mark.parametrize("name", CASES)
def test_a_folder_gives_what_transformers_makes_of_it(name, tmp_path):
    assert difference(ANSWERS[name], read(write_case(name, tmp_path / "case"), CASES[name].texts)) == ""


@pytest.mark.parametrize("seed", [int(name) for name in ANSWERS if name.isdigit()])
def test_a_folder_drawn_at_random_gives_what_transformers_makes_of_it(seed, tmp_path):
    """compare_huggingface_folders.py has done so with 200 of them."""
    draw(seed, tmp_path / "drawn")
    assert difference(ANSWERS[str(seed)], read(tmp_path / "drawn", texts(seed, 12))) == ""


def test_the_golden_answers_tell_folders_apart():
    new = {name: ANSWERS[name]["new"] for name in CASES}
    assert all(new[name][0] == [] for name in CASES if name.startswith(("the end in", "several ends")))
    begun = [json.dumps(new[name][1]) for name in CASES if name.startswith("the beginning in")]
    assert len({*begun, json.dumps(new["the tied matrix is stored twice"][1])}) == 4
    assert new["no beginning"][1] is None


def test_one_line_names_the_weights_that_are_not_used(tmp_path, capsys):
    folder = write_case("heads, buffers and a block too many", tmp_path / "case")
    load(folder)
    unused = "h.*.attn.bias, h.*.attn.masked_bias, h.*.ln_1.bias, multiple_choice_head.summary.weight, score.weight"
    assert capsys.readouterr().err.splitlines()[0] == f"gpt2: case also holds {unused}, v_head.*.b: not used"


def test_fewer_layers_than_are_stored_are_run_as_transformers_does(copy):
    """Its UNEXPECTED keys; what it would make up, the missing ones, is refused here."""
    folder = copy("settings")
    edit(folder / "config.json", n_layer=2)
    assert len(load(folder)[2]["blocks"]) == 2


@pytest.mark.parametrize(
    "config",
    [
        {"architectures": ["OpenAIGPTLMHeadModel"]},
        {"architectures": None, "n_embd": None},
        {"architectures": ["OpenAIGPTLMHeadModel"], "model_type": "openai-gpt"},
        {"model_type": "gptj"},
    ],
)
def test_a_config_of_another_kind_of_model_is_refused(copy, config):
    folder = copy("settings")
    edit(folder / "config.json", **({"model_type": None} | config))
    with pytest.raises(DamagedFile, match="config.json: model_type must be 'gpt2', not"):
        load(folder)


@pytest.mark.parametrize("ids", ["3", [3, "4"], 3.0, True, {}])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_an_end_that_is_no_id_is_refused(copy, name, ids):
    folder = copy("settings")
    edit(folder / name, eos_token_id=ids)
    with pytest.raises(DamagedFile, match=f"{name}: eos_token_id must be a token's id, not"):
        load(folder)


def test_float16_is_widened_and_a_stated_equal_head_and_stored_masks_are_left_aside(copy):
    folder = copy("settings")
    half = {f"transformer.{name}": array.astype(np.float16) for name, array in stored(folder).items()}
    half["lm_head.weight"] = half["transformer.wte.weight"]
    for i in range(3):
        half[f"transformer.h.{i}.attn.bias"] = np.tri(16, dtype=bool)[None, None]
        half[f"transformer.h.{i}.attn.masked_bias"] = np.array(-1e4, np.float32)
    safetensors.numpy.save_file(half, folder / "model.safetensors")
    _, _, params = load(folder)
    assert np.array_equal(params["wte"], half["transformer.wte.weight"].astype(np.float32))
    assert {a.dtype for a in arrays(params)} == {np.dtype("float32")}


def test_weights_at_an_odd_address_are_copied_to_an_even_one(copy):
    folder = copy("settings")
    header, data = header_of(folder / "model.safetensors")
    put(folder / "model.safetensors", json.dumps(header).encode() + b" " * (1 + len(json.dumps(header)) % 2), data)
    _, hparams, params = load(folder)
    assert all(a.flags.aligned for a in arrays(params))
    with np.load(GOLDEN / "logits.npz") as golden:
        assert np.abs(logits(params, hparams["n_head"]) - golden["settings"]).max() < 1e-4


def test_the_settings_matter_to_the_logits(copy):
    """Else the golden logits would prove nothing about them."""
    with np.load(GOLDEN / "logits.npz") as golden:
        expected = golden["settings"]
    for key in ("layer_norm_epsilon", "scale_attn_by_inverse_layer_idx", "scale_attn_weights"):
        folder = copy("settings")
        edit(folder / "config.json", **{key: None})
        _, hparams, params = load(folder)
        assert np.abs(logits(params, hparams["n_head"]) - expected).max() > 1e-2
        shutil.rmtree(folder)


def test_openais_layout_goes_first_where_both_are_there(tmp_path):
    folder = tmp_path / "both"
    shutil.copytree(utils.BUNDLED, folder)
    (folder / "config.json").write_text("{")
    assert load(folder)[1]["n_vocab"] == 2048


@pytest.mark.parametrize("name", ["config.json", "vocab.json", "added_tokens.json"])
@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff\xfe", b"[" * 100_000, b""])
def test_a_file_that_is_no_json_object_is_named(copy, name, content):
    folder = copy("bf16")
    (folder / name).write_bytes(content)
    with pytest.raises(DamagedFile, match=f"{name} (isn't JSON|isn't UTF-8|doesn't hold)"):
        load(folder)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model_type", "gptj"),
        ("activation_function", "gelu"),
        ("activation_function", ["gelu_new"]),
        ("add_cross_attention", True),
        ("scale_attn_weights", "yes"),
        ("layer_norm_epsilon", 0.0),
        ("layer_norm_epsilon", float("nan")),
        ("layer_norm_epsilon", "1e-5"),
        ("n_inner", 0),
        ("n_inner", 48.0),
        ("vocab_size", "377"),
        ("n_positions", -1),
        ("n_head", True),
        ("n_head", 5),
        ("n_layer", None),
    ],
)
def test_a_setting_that_is_not_supported_is_refused_by_name(copy, key, value):
    folder = copy("settings")
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    with pytest.raises(DamagedFile, match=f"config.json: {key} ") as error:
        load(folder)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("n_layer", 4, "lacks h.3.ln_1.weight, which config.json asks for"),
        ("n_layer", 10**100, "lacks h.3.ln_1.weight"),
        ("vocab_size", 10**100, r"wte.weight has the shape \[385, 12\], config.json asks for \[10{100}, 12\]"),
        ("n_positions", 17, r"wpe.weight has the shape \[16, 12\], config.json asks for \[17, 12\]"),
        ("n_inner", 32, r"h.0.mlp.c_fc.weight has the shape \[12, 31\], config.json asks for \[12, 32\]"),
        ("tie_word_embeddings", False, "lm_head.weight is missing"),
    ],
)
def test_weights_that_do_not_fit_are_refused_by_their_name(copy, key, value, why):
    folder = copy("settings")
    edit(folder / "config.json", **{key: value})
    with pytest.raises(DamagedFile, match=why):
        load(folder)


@pytest.mark.parametrize(
    ("name", "array", "why"),
    [
        ("lm_head.weight", np.zeros((385, 12), np.float32), "lm_head.weight differs from wte.weight"),
        ("wpe.weight", np.zeros((16, 12), np.int64), "wpe.weight is of type I64"),
        ("transformer.wpe.weight", np.zeros((16, 12), np.float32), "wpe.weight is there twice"),
    ],
)
def test_a_tensor_that_gpt2_has_no_use_for_is_refused_by_name(copy, name, array, why):
    folder = copy("settings")
    safetensors.numpy.save_file(stored(folder) | {name: array}, folder / "model.safetensors")
    with pytest.raises(DamagedFile, match=why):
        load(folder)


def one(**changes):
    """The header of a file with one tensor, 2 floats long."""
    return {"wte.weight": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes}


@pytest.mark.parametrize(
    "header",
    [
        b"{",
        b"[]",
        b"\xff",
        b"[" * 100_000,
        b'{"wte.weight": 5}',
        one(data_offsets=[0, 4]),
        one(data_offsets=[4, 12]),
        one(data_offsets=[8, 0]),
        one(data_offsets=[-8, 0]),
        one(data_offsets=[0, 2**64]),
        one(data_offsets=[0]),
        one(shape=[3]),
        one(shape=[2**63, 2**63]),
        one(shape=[-2]),
        one(dtype="F99"),
        one(dtype=None),
        {**one(), "wpe.weight": one()["wte.weight"]},
    ],
)
def test_a_hostile_header_is_refused_in_one_line(copy, header):
    folder = copy("settings")
    put(folder / "model.safetensors", header, bytes(8))
    with pytest.raises(DamagedFile, match="model.safetensors isn't a safetensors file, or is damaged") as error:
        load(folder)
    assert "\n" not in str(error.value) and len(str(error.value)) < 500


@pytest.mark.parametrize("n_bytes", [0, 7, 8, 100, 20_000, 40_019])
def test_a_file_that_is_cut_short_is_refused(copy, n_bytes):
    path = copy("settings") / "model.safetensors"
    path.write_bytes(path.read_bytes()[:n_bytes])
    with pytest.raises(DamagedFile, match="model.safetensors isn't a safetensors file, or is damaged"):
        load(path.parent)


@pytest.mark.parametrize(
    ("places", "why"),
    [
        (None, "has no weight_map"),
        ([], "has no weight_map"),
        ({"wte.weight": 5}, "has no weight_map"),
        ({"wte.weight": "../tiny/model-00001-of-00003.safetensors"}, "which isn't a file beside it"),
        ({"wte.weight": "/etc/passwd"}, "which isn't a file beside it"),
        ({"wte.weight": ".."}, "which isn't a file beside it"),
        ({"other": "model-00001-of-00003.safetensors"}, "00001-of-00003.safetensors lacks 'other'"),
        ({}, "lacks wte.weight"),
    ],
)
def test_an_index_that_leads_nowhere_is_refused(copy, places, why):
    folder = copy("sharded")
    edit(folder / "model.safetensors.index.json", weight_map=places)
    with pytest.raises(DamagedFile, match=why):
        load(folder)


def test_a_missing_shard_is_named(copy):
    folder = copy("sharded")
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="model-00002-of-00003.safetensors is missing"):
        load(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model.bin.index.json"])
def test_a_pickle_alone_is_refused_with_the_line_that_converts_it(copy, name):
    folder = copy("settings")
    (folder / "model.safetensors").rename(folder / name)
    with pytest.raises(OSError, match="pickle, which can run code .* python -c '.*save_pretrained.*' .*models/tiny$"):
        load(folder)


def test_no_weights_at_all_is_said(copy):
    folder = copy("settings")
    (folder / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="neither model.safetensors nor"):
        load(folder)


def test_without_the_package_the_line_to_install_it_is_given(copy, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(OSError, match="pip install safetensors$"):
        load(GOLDEN / "settings")
    with pytest.raises(OSError, match="pip install safetensors$"):
        export(tmp_path / "out", "fairytale")
    assert not list(tmp_path.iterdir())
