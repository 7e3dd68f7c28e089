"""Ids and text are those of transformers' tokenizer; its files are read in all their forms, or refused in one line."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from folders import GOLDEN, MODELS, TEMPLATE, edit, load, write_case

import gpt2
import gpt2_kvcache
from batch import stream_batch
from errors import DamagedFile
from sampling import greedy

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("name", MODELS)
def test_ids_equal_those_of_its_tokenizer_on_300_texts(name):
    encoder, _, _ = load(GOLDEN / name)
    golden = json.loads((GOLDEN / "ids.json").read_text())
    assert len(golden["texts"]) == 300
    for text, ids in zip(golden["texts"], golden[name], strict=True):
        assert encoder.encode(text) == ids
        assert encoder.decode(ids) == text


def test_the_text_end_is_the_one_that_tokenizer_config_names(copy):
    folder = copy("settings")
    edit(folder / "config.json", eos_token_id=None)
    assert load(folder)[0].end_of_text == 376
    for eos in ("<pad>", {"content": "<pad>", "lstrip": False}):
        edit(folder / "tokenizer_config.json", eos_token=eos)
        encoder = load(folder)[0]
        assert encoder.end_of_text == encoder.encode("<pad>")[0] > 376


def test_an_added_token_of_letters_with_accents_is_decoded_as_text():
    encoder, _, _ = load(GOLDEN / "settings")
    assert len(encoder.encode("ñandú")) == 1 and encoder.decode(encoder.encode("ñandú")) == "ñandú"


def test_only_a_text_with_a_token_that_has_no_row_is_refused(tmp_path):
    encoder, _, _ = load(write_case("a pad token without a row", tmp_path / "case"))
    assert encoder.decode(encoder.encode("the king")) == "the king"
    with pytest.raises(ValueError, match="^the model has 317 tokens, and '<pad>' isn't one of them$"):
        encoder.encode("the <pad>king")


@pytest.mark.parametrize(
    ("name", "prompt", "why"),
    [
        ("a pad token without a row", "the <pad>", "the model has 317 tokens, and '<pad>' isn't one of them"),
        ("no beginning", "", "the prompt is empty, and this model has no token that begins a text: write something"),
    ],
)
def test_a_prompt_that_the_model_cannot_begin_with_is_one_line(name, prompt, why, tmp_path):
    write_case(name, tmp_path / "case")
    command = [sys.executable, ROOT / "gpt2_kvcache.py", prompt, "--model_size", "case", "--models_dir", tmp_path]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr.splitlines()[1:] == [f"gpt2_kvcache.py: {why}"]


def test_a_batch_with_ids_that_only_pad_keeps_all_its_texts(tmp_path):
    encoder, hparams, params = load(write_case("rows that only pad", tmp_path / "case"))
    requests = [(encoder.encode(prompt), greedy) for prompt in ("the king", "a", "Once")]
    texts = list(stream_batch(requests, params, hparams["n_head"], 5, encoder.end_of_text))
    assert texts == [[318] * 5] * 3 and [encoder.decode(text) for text in texts] == [""] * 3


def test_text_stops_at_any_of_several_ends(tmp_path):
    encoder, hparams, params = load(write_case("several ends in generation_config.json", tmp_path / "case"))
    assert encoder.end_of_text == (3, 317)
    arguments = encoder.encode("Once"), params, hparams["n_head"], 5
    assert gpt2.generate(*arguments) == gpt2_kvcache.generate(*arguments) == [317] * 5
    assert gpt2.generate(*arguments, end_of_text=encoder.end_of_text) == []
    assert gpt2_kvcache.generate(*arguments, end_of_text=encoder.end_of_text) == []
    requests = [(encoder.encode("Once"), greedy)]
    assert list(stream_batch(requests, params, hparams["n_head"], 5, encoder.end_of_text)) == [[]]


def test_pieces_that_no_merge_makes_are_reported(tmp_path, capsys):
    folder = write_case("no beginning", tmp_path / "case")
    merges = (folder / "merges.txt").read_text().splitlines()
    (folder / "merges.txt").write_text("\n".join(merges[:-10]) + "\n")
    load(folder)
    assert re.match(
        r"gpt2: .*vocab.json: no merge makes '.*' \(of 10\); were merges cut short\?\n", capsys.readouterr().err
    )


def test_a_class_of_tokenizer_that_works_otherwise_is_refused(copy):
    folder = copy("settings")
    edit(folder / "tokenizer_config.json", tokenizer_class="RobertaTokenizer")
    with pytest.raises(DamagedFile, match="tokenizer_config.json: tokenizer_class 'RobertaTokenizer' isn't supported"):
        load(folder)


@pytest.mark.parametrize(
    ("key", "change", "why"),
    [
        ("normalizer", {"type": "Lowercase"}, "its normalizer differs"),
        ("pre_tokenizer", {"type": "Whitespace"}, "its pre_tokenizer differs"),
        ("post_processor", {"type": "TemplateProcessing", "special_tokens": {"<s>": {}}}, "its post_processor differs"),
        ("post_processor", {"type": "Sequence", "processors": [TEMPLATE] * 2}, "its post_processor differs"),
        ("post_processor", {"type": "RobertaProcessing"}, "its post_processor differs"),
        ("model", {"type": "WordPiece"}, "its model differs"),
        ("model", {"type": "BPE", "vocab": []}, "'merges' is missing"),
        ("model", {"type": "BPE", "vocab": [1], "merges": []}, "not a tokenizer"),
        ("model", [], "not a tokenizer"),
        ("added_tokens", [{"content": "<y>"}], "'id' is missing"),
        ("added_tokens", [{"content": 5, "id": 377}], "not a tokenizer"),
        ("added_tokens", [7], "not a tokenizer"),
    ],
)
def test_a_tokenizer_of_another_kind_or_a_damaged_one_is_refused(copy, key, change, why):
    folder = copy("settings")
    edit(folder / "tokenizer.json", **{key: change})
    with pytest.raises(DamagedFile, match=why) as error:
        load(folder)
    assert "\n" not in str(error.value) and len(str(error.value)) < 500


def test_a_tokenizer_file_of_the_first_versions_is_read_too(copy):
    """Without the model's type, merges as lines, another post-processor: as the file in the `gpt2` repository."""
    folder = copy("settings")
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    model = {"dropout": None, "vocab": model["vocab"], "merges": [" ".join(pair) for pair in model["merges"]]}
    edit(folder / "tokenizer.json", model=model, post_processor={"type": "ByteLevel", "trim_offsets": False})
    golden = json.loads((GOLDEN / "ids.json").read_text())
    assert [load(folder)[0].encode(text) for text in golden["texts"][:9]] == golden["settings"][:9]


@pytest.mark.parametrize("name", ["vocab.json", "merges.txt"])
def test_a_missing_vocabulary_file_is_named(copy, name):
    folder = copy("bf16")
    (folder / name).unlink()
    with pytest.raises(FileNotFoundError, match=name):
        load(folder)
