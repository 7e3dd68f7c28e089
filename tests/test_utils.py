import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from store import gzipped, no_length, serving, status, web_page
from tiny import random_params

import gpt2
import utils
from errors import DamagedFile
from model_files.download import FILES, GRAPH
from utils import arrange, choose_model, load_encoder_hparams_and_params, load_hparams, tensors

HPARAMS = {"n_vocab": 50, "n_ctx": 16, "n_embd": 12, "n_head": 4, "n_layer": 2}
CHECKPOINTS = Path(__file__).parent / "golden" / "checkpoints"
UNREACHABLE = "http://127.0.0.1:1/models"


def flat(params):
    """name -> array, as a checkpoint has them."""
    weights = {}

    def walk(path, node):
        for key, value in node.items():
            if isinstance(value, dict):
                walk(f"{path}{key}/", value)
            else:
                weights[path + key] = value

    walk("", {key: value for key, value in params.items() if key != "blocks"})
    for i, block in enumerate(params["blocks"]):
        walk(f"h{i}/", block)
    return weights


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    monkeypatch.setenv("GPT2_BASE_URL", UNREACHABLE)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture
def store(monkeypatch):
    with serving(dict.fromkeys(FILES, b"x")) as store:
        monkeypatch.setenv("GPT2_BASE_URL", store.url)
        yield store


@pytest.fixture
def model(tmp_path, monkeypatch):
    """A tiny model in a folder, with the bundled tokenizer: models/tiny."""
    folder = tmp_path / "models" / "tiny"
    folder.mkdir(parents=True)
    for name in ("encoder.json", "vocab.bpe"):
        shutil.copy(utils.BUNDLED / name, folder)
    (folder / "hparams.json").write_text(json.dumps(HPARAMS | {"n_vocab": 2048}))
    monkeypatch.setattr(utils, "load_weights", lambda folder: flat(random_params(n_vocab=2048)))
    monkeypatch.chdir(tmp_path)
    return folder


def put_size(models_dir, size="124M"):
    (models_dir / size).mkdir(parents=True)
    for name in set(FILES) - {GRAPH}:
        (models_dir / size / name).touch()


# Which model runs


def test_left_out_it_is_124M_if_that_is_on_disk(tmp_path):
    put_size(tmp_path)
    assert choose_model(None, tmp_path) == (tmp_path / "124M", "")


def test_left_out_it_is_the_bundled_one_where_the_host_cannot_be_reached(tmp_path):
    folder, note = choose_model(None, tmp_path / "models")
    assert folder == utils.BUNDLED
    assert "can't reach 127.0.0.1:1 (" in note and "--model_size 124M" in note and "\n" not in note
    assert not (tmp_path / "models").exists()


def test_left_out_it_is_the_users_own_fairytale_if_there_is_one(tmp_path):
    (tmp_path / "fairytale").mkdir()
    assert choose_model(None, tmp_path)[0] == tmp_path / "fairytale"


@pytest.mark.parametrize("fault", [status(403), status(404), status(500), status(503), web_page(), gzipped, no_length])
def test_left_out_and_the_host_has_no_such_file_for_us_it_is_the_bundled_one(store, tmp_path, fault):
    store.faults["HEAD", "vocab.bpe"] = [fault]
    folder, note = choose_model(None, tmp_path / "models")
    assert folder == utils.BUNDLED
    assert f"{store.url}/124M/vocab.bpe: " in note and "--model_size 124M" in note and "\n" not in note
    assert not (tmp_path / "models").exists()
    store.faults["HEAD", "vocab.bpe"] = [fault]
    with pytest.raises(OSError, match="124M/vocab.bpe: .*; --model_size fairytale needs no network$"):
        choose_model("124M", tmp_path / "models")


@pytest.mark.parametrize("proxy", ["socks5://127.0.0.1", "ftp://127.0.0.1", "http://127.0.0.1:1", "http://[1", "://"])
def test_left_out_and_the_proxy_is_of_no_use_it_is_the_bundled_one(tmp_path, monkeypatch, proxy):
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, proxy)
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "")
    folder, note = choose_model(None, tmp_path / "models")
    assert folder == utils.BUNDLED and "can't reach 127.0.0.1:1 (" in note and "\n" not in note
    with pytest.raises(ConnectionError, match="^can't reach 127.0.0.1:1 "):
        choose_model("124M", tmp_path / "models")


def test_left_out_and_the_certificate_cannot_be_checked_it_is_the_bundled_one(store, tmp_path, monkeypatch):
    monkeypatch.setenv("GPT2_BASE_URL", store.url.replace("http:", "https:"))  # it speaks no TLS
    folder, note = choose_model(None, tmp_path / "models")
    assert folder == utils.BUNDLED and "can't reach 127.0.0.1:" in note and "\n" not in note
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(tmp_path / "missing.pem"))
    folder, note = choose_model(None, tmp_path / "models")
    assert folder == utils.BUNDLED and "missing.pem" in note and "\n" not in note


def test_a_download_that_fails_half_way_does_not_fall_back(store, tmp_path, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    store.faults["GET", "checkpoint"] = [status(503)] * 9
    with pytest.raises(OSError, match="503"):
        choose_model(None, tmp_path)


@pytest.mark.parametrize("size", ["124M", "355M", "774M", "1558M"])
def test_a_size_that_is_asked_for_never_falls_back(tmp_path, size):
    with pytest.raises(ConnectionError, match=r"^can't reach 127.0.0.1:1 \(.*--model_size fairytale needs no network$"):
        choose_model(size, tmp_path / "models")
    assert not (tmp_path / "models").exists()


def test_a_size_that_is_asked_for_is_downloaded(store, tmp_path):
    with pytest.raises(DamagedFile, match="part-checkpoint"):  # the store's files are all "x"
        choose_model("774M", tmp_path)
    assert store.asked[-1] == ("GET", "checkpoint", None)


def test_the_bundled_model_is_found_by_name_wherever_models_dir_is(tmp_path):
    assert choose_model("fairytale", tmp_path)[0] == utils.BUNDLED
    assert choose_model("fairytale", tmp_path / "missing")[0] == utils.BUNDLED
    assert choose_model("fairytale", None)[0] == utils.BUNDLED
    (tmp_path / "fairytale").mkdir()
    assert choose_model("fairytale", tmp_path)[0] == tmp_path / "fairytale"


def test_any_other_name_is_a_folder_in_models_dir(tmp_path):
    (tmp_path / "a tale..").mkdir()
    assert choose_model("a tale..", tmp_path) == (tmp_path / "a tale..", "")
    assert choose_model("a tale..", str(tmp_path))[0] == tmp_path / "a tale.."


@pytest.mark.parametrize(
    "name",
    ["other", "", ".", "..", "../models", "../secret", "tale/", "./tale", "tale/../tale", "..\\secret", "/", "C:", "~"]
    + [".hidden", "file", "tale\0", "x" * 100_000, "\ud800", 355, True, ["tale"]],
)
def test_an_unknown_name_or_a_path_is_refused_with_a_list_of_what_there_is(store, tmp_path, name):
    for folder in ("models/tale", "models/.hidden", "secret"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "models" / "file").touch()
    with pytest.raises(ValueError, match=r"no model .*; there are 124M, 355M, 774M, 1558M .* fairytale, tale$"):
        choose_model(name, tmp_path / "models")
    assert store.asked == []


def test_an_absolute_path_is_refused(tmp_path):
    (tmp_path / "tale").mkdir()
    with pytest.raises(ValueError, match="no model"):
        choose_model(str(tmp_path / "tale"), tmp_path)


def test_a_missing_models_dir_is_said_so(tmp_path):
    with pytest.raises(ValueError, match="missing, which doesn't exist; there are 124M"):
        choose_model("tale", tmp_path / "missing")


@pytest.mark.parametrize("model_size", [None, "124M", "fairytale", "tale"])
def test_a_models_dir_that_is_a_file_is_refused_before_any_work(store, tmp_path, model_size):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="--models_dir .*file is a file"):
        choose_model(model_size, tmp_path / "file")
    assert store.asked == []


def test_a_read_only_models_dir_is_said_so(store, tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)  # tests may run as root, who may write anywhere
    with pytest.raises(OSError, match=r"can't write to .*124M \(Permission denied\); --models_dir names another"):
        choose_model("124M", tmp_path)


# Loading


def test_params_are_nested_as_the_engine_wants_them(model):
    encoder, hparams, params = load_encoder_hparams_and_params("tiny", "models")
    wanted = random_params(n_vocab=2048)
    assert hparams == HPARAMS | {"n_vocab": 2048}
    assert encoder.decode(encoder.encode("Once upon a time")) == "Once upon a time"
    assert params.keys() == wanted.keys()
    assert len(params["blocks"]) == 2
    assert flat(params).keys() == flat(wanted).keys()
    for name, array in flat(wanted).items():
        np.testing.assert_array_equal(flat(params)[name], array)


@pytest.mark.parametrize("golden, sizes", [("one_shard", (11, 6, 4, 2, 2)), ("ones", (1, 1, 1, 1, 1))])
def test_a_real_checkpoint_loads(model, monkeypatch, golden, sizes):
    monkeypatch.undo()
    fake = type("Encoder", (), {"encoder": {}, "decoder": {}})
    monkeypatch.setattr(utils, "get_encoder", lambda name, models_dir: fake)
    for path in (CHECKPOINTS / golden).iterdir():
        shutil.copy(path, model)
    (model / "hparams.json").write_text(json.dumps(dict(zip(HPARAMS, sizes, strict=True))))
    _, _, params = load_encoder_hparams_and_params("tiny", model.parent)
    expected = np.load(CHECKPOINTS / golden / "expected.npz")
    last = len(params["blocks"]) - 1
    np.testing.assert_array_equal(params["blocks"][last]["mlp"]["c_fc"]["w"], expected[f"model/h{last}/mlp/c_fc/w"][0])
    np.testing.assert_array_equal(params["wte"], expected["model/wte"])
    assert {array.dtype for array in flat(params).values()} == {np.dtype(np.float32)}


def test_the_bundled_model_loads(tmp_path):
    encoder, hparams, params = load_encoder_hparams_and_params("fairytale", tmp_path)
    assert len(params["blocks"]) == hparams["n_layer"]
    assert params["wte"].shape == (len(encoder.encoder), hparams["n_embd"])


def test_one_line_on_stderr_names_the_model(model, capsys):
    load_encoder_hparams_and_params("tiny", "models")
    assert capsys.readouterr() == ("", "gpt2: model tiny (models/tiny)\n")


def test_one_line_on_stderr_names_the_fallback_and_how_to_ask_for_124M(model, capsys, monkeypatch):
    model.rename(model.parent / "fairytale")
    load_encoder_hparams_and_params(None, "models")
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert err.startswith("gpt2: model fairytale (models/fairytale) in place of 124M: can't reach 127.0.0.1:1 (")
    assert err.endswith("; --model_size 124M insists on it\n")


def test_a_working_directory_that_is_gone_does_not_matter(capsys, monkeypatch, tmp_path):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    load_encoder_hparams_and_params("fairytale")
    assert capsys.readouterr().err == f"gpt2: model fairytale ({utils.BUNDLED})\n"


def test_nothing_is_said_of_a_model_that_cannot_be_loaded(model, capsys):
    (model / "hparams.json").unlink()
    with pytest.raises(FileNotFoundError, match="hparams.json"):
        load_encoder_hparams_and_params("tiny", "models")
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("name", ["hparams.json", "encoder.json", "vocab.bpe"])
def test_a_missing_file_is_named(model, name):
    (model / name).unlink()
    with pytest.raises(FileNotFoundError, match=name):
        load_encoder_hparams_and_params("tiny", "models")


def test_more_ids_than_n_vocab_are_refused(model):
    (model / "hparams.json").write_text(json.dumps(HPARAMS | {"n_vocab": 2047}))
    with pytest.raises(DamagedFile, match=r"tiny.encoder.json has 2048 ids, n_vocab in hparams.json is 2047"):
        load_encoder_hparams_and_params("tiny", "models")


def test_rows_that_only_pad_wte_stand_for_nothing(model, monkeypatch):
    monkeypatch.setattr(utils, "load_weights", lambda folder: flat(random_params(n_vocab=2112)))
    (model / "hparams.json").write_text(json.dumps(HPARAMS | {"n_vocab": 2112}))
    encoder, _, _ = load_encoder_hparams_and_params("tiny", "models")
    assert encoder.decode([2048, 2111, 2047]) == "<|endoftext|>" and encoder.decode_bytes([2111]) == b""
    with pytest.raises(ValueError, match="no token has the id 2112: ids are 0 to 2111"):
        encoder.decode([2112])


def test_a_damaged_file_of_openais_says_how_to_get_it_again(model):
    model.rename(model.parent / "355M")
    for name in FILES:
        (model.parent / "355M" / name).touch()
    (model.parent / "355M" / "hparams.json").write_text("{")
    with pytest.raises(DamagedFile, match="hparams.json isn't JSON; with .*355M removed, the same command downloads"):
        load_encoder_hparams_and_params("355M", model.parent)


# hparams.json


def hparams_file(tmp_path, content):
    (tmp_path / "hparams.json").write_bytes(content)
    return tmp_path / "hparams.json"


def test_a_byte_order_mark_and_crlf_are_no_harm(tmp_path):
    text = json.dumps(HPARAMS, indent=2).replace("\n", "\r\n")
    assert load_hparams(hparams_file(tmp_path, text.encode("utf-8-sig"))) == HPARAMS


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"n_vocab: 50257", b"<html></html>", b"\xff\xfe{\0}\0", b"\0" * 99, b"[" * 100_000]
    + [b'{"n_vocab": ' + b"9" * 5000 + b"}"],
)
def test_hparams_that_are_not_json_are_refused(tmp_path, content):
    with pytest.raises(DamagedFile, match="hparams.json isn't JSON$"):
        load_hparams(hparams_file(tmp_path, content))


@pytest.mark.parametrize("content", [b"[]", b"12", b"null", b'"n_vocab"', b"NaN"])
def test_hparams_that_are_no_object_are_refused(tmp_path, content):
    with pytest.raises(DamagedFile, match="hparams.json doesn't hold a JSON object$"):
        load_hparams(hparams_file(tmp_path, content))


@pytest.mark.parametrize("key", HPARAMS)
def test_a_missing_key_is_named(tmp_path, key):
    content = json.dumps({k: v for k, v in HPARAMS.items() if k != key}).encode()
    with pytest.raises(DamagedFile, match=f"hparams.json lacks {key}$"):
        load_hparams(hparams_file(tmp_path, content))


@pytest.mark.parametrize("value", [0, -1, 12.0, "12", None, True, [12], {}, float("nan"), float("inf"), "x" * 999])
@pytest.mark.parametrize("key", HPARAMS)
def test_a_value_that_is_no_positive_whole_number_is_refused(tmp_path, key, value):
    content = json.dumps(HPARAMS | {key: value}).encode()
    with pytest.raises(DamagedFile, match=f"hparams.json: {key} must be a positive whole number, not .{{1,40}}$"):
        load_hparams(hparams_file(tmp_path, content))


def test_sizes_of_one_are_sizes(tmp_path):
    ones = dict.fromkeys(HPARAMS, 1) | {"n_inner": 1}
    assert load_hparams(hparams_file(tmp_path, json.dumps(ones).encode())) == ones
    weights = {name: np.ones(shape, np.float32) for name, shape in tensors(ones)}
    assert gpt2.gpt2([0], **arrange(weights, ones, tmp_path), n_head=1).shape == (1, 1)


def test_n_head_must_divide_n_embd(tmp_path):
    with pytest.raises(DamagedFile, match="n_head 5 doesn't divide n_embd 12"):
        load_hparams(hparams_file(tmp_path, json.dumps(HPARAMS | {"n_head": 5}).encode()))


# Weights and hparams together


@pytest.mark.parametrize("name", [name for name, _ in tensors(HPARAMS)])
def test_a_missing_tensor_is_named(name):
    weights = flat(random_params())
    del weights[name]
    with pytest.raises(DamagedFile, match=f"^models/tiny: the checkpoint lacks model/{name}, "):
        arrange(weights, HPARAMS, "models/tiny")


@pytest.mark.parametrize("name", [name for name, _ in tensors(HPARAMS)])
def test_a_tensor_of_another_shape_is_named_with_both_shapes(name):
    weights = flat(random_params())
    shape = weights[name].shape
    weights[name] = np.zeros((*shape[:-1], shape[-1] + 1), np.float32)
    found, wanted = list(weights[name].shape), list(shape)
    with pytest.raises(DamagedFile) as error:
        arrange(weights, HPARAMS, "models/tiny")
    assert str(error.value) == f"models/tiny: model/{name} has the shape {found}, hparams.json asks for {wanted}"


@pytest.mark.parametrize("key, tensor", [("n_vocab", "wte"), ("n_ctx", "wpe"), ("n_embd", "wte"), ("n_layer", "h2")])
def test_hparams_of_a_larger_model_are_refused(key, tensor):
    with pytest.raises(DamagedFile, match=f"model/{tensor}"):
        arrange(flat(random_params()), HPARAMS | {key: HPARAMS[key] * 2}, "models/tiny")


def test_blocks_beyond_n_layer_are_refused():
    with pytest.raises(
        DamagedFile, match="the checkpoint has model/h1/attn/c_attn/b, for which hparams.json has no place"
    ):
        arrange(flat(random_params()), HPARAMS | {"n_layer": 1}, "models/tiny")


@pytest.mark.parametrize("name", ["lm_head/w", "h0/attn/c_attn/w/x", "h", "h00/ln_1/g", "wte/w"])
def test_a_tensor_that_gpt2_does_not_have_is_refused(name):
    weights = flat(random_params()) | {name: np.zeros(3, np.float32)}
    with pytest.raises(DamagedFile, match=f"the checkpoint has model/{name}, for which"):
        arrange(weights, HPARAMS, "models/tiny")


def test_a_billion_layers_are_refused_at_once():
    with pytest.raises(DamagedFile, match="lacks model/h2/ln_1/g"):
        arrange(flat(random_params()), HPARAMS | {"n_layer": 10**9}, "models/tiny")


def test_arrange_changes_no_argument():
    weights = flat(random_params())
    before = dict(weights)
    arrange(weights, HPARAMS, "models/tiny")
    assert weights == before
