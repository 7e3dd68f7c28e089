"""encoder.py gives tiktoken's ids, gives every text back, keeps to its time and memory, and refuses damaged files."""

import json
import os
import random
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st

import encoder
from encoder import BYTE_PIECES, END_OF_TEXT, get_encoder, merge
from errors import DamagedFile

ROOT = Path(__file__).parent.parent
FAIRYTALE = ROOT / "models" / "fairytale"
DOCUMENTS = sorted(
    path
    for path in ROOT.rglob("*")
    if path.suffix in (".md", ".py") and not any(part.startswith(".") for part in path.relative_to(ROOT).parts)
)
GPT2_WORD = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""  # tiktoken's own spelling


def tiktoken_of(ours, word=GPT2_WORD):
    """tiktoken with the same vocabulary; its own copy of it would come from the network."""
    ids = {bytes_of(piece): i for piece, i in ours.encoder.items() if piece != END_OF_TEXT}
    special = {END_OF_TEXT: ours.end_of_text}
    return tiktoken.Encoding("same", pat_str=word, mergeable_ranks=ids, special_tokens=special)


def bytes_of(piece):
    return bytes(BYTE_PIECES.index(character) for character in piece)


@pytest.fixture(scope="module")
def gpt2(gpt2_vocabulary_dir):
    return get_encoder(gpt2_vocabulary_dir.name, gpt2_vocabulary_dir.parent)


@pytest.fixture(scope="module")
def gpt2_tiktoken(gpt2):
    return tiktoken_of(gpt2)


@pytest.fixture(scope="module")
def fairytale():
    return get_encoder(FAIRYTALE.name, FAIRYTALE.parent)


# ---- the same ids as tiktoken

TEXTS = [
    "", " ", "  ", "   a", "a   ", "\n", "\n\n\n", " \n \t\r\n x", "\t\tif x:\n\t\t\treturn", "\x00\x01\x1f\x7f",
    "Hello world", " Hello  world ", "HELLO", "I'll, you've; they're 'd I'm he's don't", "I'LL DON'T", "''s'",
    "x'sy 't", "Alan Turing theorized that computers would one day become", "supercalifragilisticexpialidocious",
    "the The THE", "0", "007", "1e3", "3.14159265358979", "1234567890" * 5, "[1, 2]", "True", "None", '"quoted"',
    "{'a': [\"b\"]}", "<|endoftext|>", "a<|endoftext|>b", "<|", "|>", "def f(x):\n    return x**2  # square\n",
    "a_b__c---d...e!!!?", "https://example.org/?q=1&r=2#s", "naïve café Zürich", "e\u0301", "ﬁ ﬂ",
    "Ελληνικά", "Привет, мир", "שלום", "مرحبا بالعالم", "नमस्ते दुनिया", "ไทย", "你好，世界", "こんにちは 世界", "한국어",
    "😀", "👩‍👩‍👧‍👦 🇩🇪 👍🏽", "²³¼½ Ⅷ ٣ ०", "\xa0x\xad", "\u2028\u2029\u0085\u3000\u200b\ufeff", "\ufffd", "\U0010ffff",
    "a" * 100, " " * 1000, "ab" * 60, "Ġ", "Ã©", "!" * 33, "=" * 79, "-" * 32, "aaaaaaab" * 9, "\t \t  \t   ",
    "\r\n\r\n", "x" * 31 + " " + "y" * 33,
]  # fmt: skip
STRINGS = TEXTS + [a + b for a, b in zip(TEXTS, TEXTS[7:] + TEXTS[:7], strict=True)]
STRINGS += [changed for text in TEXTS for changed in (f"{text} {text}", f"x{text}\n{text}'s", text[::-1])]


def test_ids_are_those_of_openai(gpt2):
    assert len(gpt2.encoder) == len(gpt2.decoder) == 50257 and gpt2.end_of_text == 50256
    assert gpt2.encode("Hello world") == [15496, 995]
    assert gpt2.encode("Not all heroes wear capes.") == [3673, 477, 10281, 5806, 1451, 274, 13]


def test_hundreds_of_strings_as_tiktoken(gpt2, gpt2_tiktoken):
    assert len(STRINGS) > 300
    for text in STRINGS:
        ids = gpt2.encode(text)
        assert ids == gpt2_tiktoken.encode_ordinary(text), repr(text)
        assert gpt2.decode(ids) == text


@settings(max_examples=300, deadline=None, database=None)
@given(text=st.text(max_size=60) | st.text(alphabet="aeinrst 'sldm01.\n\té你😀", max_size=200))
def test_any_unicode_as_tiktoken(gpt2, gpt2_tiktoken, fairytale, text):
    ids = gpt2.encode(text)
    assert ids == gpt2_tiktoken.encode_ordinary(text)
    assert gpt2.decode(ids) == text
    assert fairytale.decode(fairytale.encode(text)) == text


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_documents_of_this_repository_as_tiktoken(gpt2, gpt2_tiktoken, fairytale, path):
    text = path.read_text(encoding="utf-8")
    ids = gpt2.encode(text)
    assert ids == gpt2_tiktoken.encode_ordinary(text)
    assert gpt2.decode(ids) == fairytale.decode(fairytale.encode(text)) == text


@pytest.mark.parametrize(
    "text",
    ["\ud800", "a\udfffb", "\ude00\ud83d", "\ud83d\ude00", "\ud83d\ud83d\ude00\n", " \udcff\udcfe x", "\ufeff\ud800"],
    ids=ascii,
)
def test_surrogates_as_tiktoken(gpt2, gpt2_tiktoken, text):
    assert gpt2.encode(text) == gpt2_tiktoken.encode_ordinary(text)


def test_lone_surrogates_become_the_replacement_character_and_pairs_one_character(gpt2):
    assert gpt2.decode(gpt2.encode("a\ud800b\ud83d\ude00")) == "a\ufffdb😀"


def test_an_empty_prompt_begins_with_the_token_that_begins_a_text(fairytale):
    assert fairytale.encode_prompt("") == [fairytale.begin_of_text] == [2047]
    assert fairytale.encode_prompt("the") == fairytale.encode("the")
    without = encoder.Encoder(fairytale.encoder, fairytale.ranks, (), None)
    assert without.encode_prompt("the") == fairytale.encode("the")
    with pytest.raises(ValueError, match="the prompt is empty, and this model has no token that begins a text"):
        without.encode_prompt("")


def test_end_of_text_in_a_text_is_ordinary(gpt2, fairytale):
    for each in (gpt2, fairytale):
        ids = each.encode("a<|endoftext|>b")
        assert each.end_of_text not in ids and each.decode(ids) == "a<|endoftext|>b"
        assert each.decode([each.end_of_text]) == END_OF_TEXT


# A merge that searched the whole word again after each step would need hours for these.
MEGABYTES = {
    "the letter a": "a" * 10**6,
    "spaces": " " * 10**6,
    "emoji": "😀" * 250_000,
    "one word": "".join(random.Random(1).choices("abcdefghijklmnopqrstuvwxyz", k=10**6)),
}


@pytest.mark.parametrize("text", MEGABYTES.values(), ids=MEGABYTES)
def test_a_megabyte_without_a_cut_as_tiktoken(gpt2, text):
    ids = gpt2.encode(text)
    assert ids == tiktoken_of(gpt2, r"[\s\S]+").encode_ordinary(text)  # GPT-2's pattern crashes tiktoken on the spaces
    assert gpt2.decode(ids) == text


# ---- the algorithm


def merge_by_the_book(word, ranks):
    """Step 3 of the docstring of encoder.py, as it stands there."""
    pieces = list(word)
    while fitting := [pair for pair in map(" ".join, zip(pieces, pieces[1:], strict=False)) if pair in ranks]:
        left, right = min(fitting, key=ranks.get).split(" ")
        merged = []
        while pieces:
            pair = pieces[:2] == [left, right]
            merged.append(left + right if pair else pieces[0])
            pieces = pieces[2:] if pair else pieces[1:]
        pieces = merged
    return pieces


@settings(max_examples=500, deadline=None, database=None)
@given(
    word=st.text(alphabet="abc", max_size=40),
    draws=st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99)), max_size=12),
    order=st.randoms(use_true_random=False),
)
def test_merging_with_a_heap_is_merging_by_the_book(word, draws, order):
    pieces, merges = ["a", "b", "c"], []
    for i, j in draws:
        left, right = pieces[i % len(pieces)], pieces[j % len(pieces)]
        merges.append(f"{left} {right}")
        pieces.append(left + right)
    order.shuffle(merges)  # also lists that no training makes: a piece in a merge before the one that makes it
    ranks = {pair: rank for rank, pair in enumerate(merges)}
    assert merge(word, ranks) == merge_by_the_book(word, ranks)


def test_encoding_twice_gives_independent_lists(fairytale):
    ids = fairytale.encode("Once upon a time")
    again = fairytale.encode("Once upon a time")
    ids.append(0)
    assert fairytale.encode("Once upon a time") == again != ids


# ---- decode


def test_ids_may_split_a_character(gpt2):
    ids = gpt2.encode("x你😀")
    assert gpt2.decode_bytes(ids) == b"".join(gpt2.decode_bytes([i]) for i in ids) == "x你😀".encode()
    assert gpt2.decode(ids[:-1]).endswith("\ufffd")


def test_every_id_decodes_to_the_bytes_of_its_piece(gpt2, fairytale):
    for each in (gpt2, fairytale):
        assert all(each.encoder[piece] == i for i, piece in each.decoder.items())
        assert all(each.decode_bytes([i]) == bytes_of(piece) for piece, i in each.encoder.items())


@pytest.mark.parametrize("wrong", [-1, 2048, 10**30, 0.5])
def test_an_id_out_of_range_is_named(fairytale, wrong):
    with pytest.raises(ValueError, match=rf"^no token has the id {wrong}: ids are 0 to 2047$"):
        fairytale.decode([5, wrong])


# ---- memory


def retained(action):
    """Bytes still allocated after `action()`."""
    action()  # whatever is made once for all
    tracemalloc.start()
    try:
        action()
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


def test_the_cache_of_words_has_a_limit(monkeypatch):
    monkeypatch.setattr(encoder, "CACHED_WORDS", 100)
    small = get_encoder(FAIRYTALE.name, FAIRYTALE.parent)
    numbers = iter(range(10**6))
    assert retained(lambda: [small.encode(str(next(numbers))) for _ in range(3000)] and None) < 200_000


def test_long_words_are_not_kept(fairytale):
    letters = iter("abcdefgh")
    assert retained(lambda: [fairytale.encode(next(letters) * 20_000) for _ in range(4)] and None) < 50_000


# ---- files

PIECES = [*BYTE_PIECES, "he", "Ġt", "Ġthe", END_OF_TEXT]
IDS = {piece: i for i, piece in enumerate(PIECES)}
MERGES = ["h e", "Ġ t", "Ġt he"]


def written(models_dir, ids=IDS, merges=MERGES):
    """A small model's two files, `ids` as JSON unless it is bytes, `merges` under the version unless it is bytes."""
    (models_dir / "m").mkdir(exist_ok=True)
    ids = ids if isinstance(ids, bytes) else json.dumps(ids).encode()
    merges = merges if isinstance(merges, bytes) else "\n".join(["#version: 0.2", *merges, ""]).encode()
    (models_dir / "m" / "encoder.json").write_bytes(ids)
    (models_dir / "m" / "vocab.bpe").write_bytes(merges)
    return models_dir


def refusal(models_dir):
    """The message with which the model is refused: one line."""
    with pytest.raises(DamagedFile) as refused:
        get_encoder("m", models_dir)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_a_small_vocabulary_loads(tmp_path):
    small = get_encoder("m", written(tmp_path))
    assert [small.decoder[i] for i in small.encode("the the")] == ["t", "he", "Ġthe"]
    assert small.end_of_text == 259


def test_the_order_of_encoder_json_does_not_matter(tmp_path):
    small = get_encoder("m", written(tmp_path, dict(reversed(IDS.items()))))
    assert small.encode(" the") == [258] and small.decode([258]) == " the"


def test_crlf_and_a_byte_order_mark_are_read(tmp_path):
    merges = "\r\n".join(["\ufeff#version: 0.2", *MERGES, ""]).encode()
    ids = ("\ufeff" + json.dumps(IDS, indent=1, ensure_ascii=False).replace("\n", "\r\n")).encode()
    small = get_encoder("m", written(tmp_path, ids, merges))
    assert small.encode("the the") == [BYTE_PIECES.index("t"), 256, 258]


def test_pieces_that_others_added_are_read(tmp_path):
    small = get_encoder("m", written(tmp_path, IDS | {"<|pad|>": 260, "[SEP]": 261}))
    assert small.decode([260, 261]) == "<|pad|>[SEP]"
    assert small.end_of_text == 259


def test_files_are_utf8_in_any_locale(gpt2, gpt2_vocabulary_dir):
    code = "import sys, encoder; print(encoder.get_encoder(*sys.argv[1:]).encode('\\u00e9 \\u4f60'))"
    ran = subprocess.run(
        [sys.executable, "-c", code, gpt2_vocabulary_dir.name, str(gpt2_vocabulary_dir.parent)],
        env={**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert ran.stderr == "" and json.loads(ran.stdout) == gpt2.encode("é 你")


@pytest.mark.parametrize("name", ["encoder.json", "vocab.bpe"])
def test_a_missing_file_is_named(tmp_path, name):
    (written(tmp_path) / "m" / name).unlink()
    with pytest.raises(FileNotFoundError) as error:
        get_encoder("m", tmp_path)
    assert name in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["encoder.json", "vocab.bpe"])
@pytest.mark.parametrize(
    "content", [b"", b"\n", b"<!DOCTYPE html>\n<html>", b"\xff\xfe{\x00}\x00", b"\x1f\x8b\x08\x00\xe9"], ids=repr
)
def test_something_else_altogether_is_refused(tmp_path, name, content):
    (written(tmp_path) / "m" / name).write_bytes(content)
    assert name in refusal(tmp_path)


@pytest.mark.parametrize(
    ("ids", "why"),
    [
        (b"{", "isn't JSON"),
        (b"[" * 200_000, "isn't JSON"),
        (b'{"a": ' + b"1" * 10_000 + b"}", ""),
        (b"[]", "object"),
        (b"null", "object"),
        (b"{}", "'!' is missing|missing"),
        ({p: i for p, i in IDS.items() if p != "Ġ"} | {"x2": 32}, "'Ġ' is missing"),
        ({p: i for p, i in IDS.items() if p != END_OF_TEXT}, "endoftext"),
        (IDS | {"he": 1000}, "ids"),
        (IDS | {"he": 0}, "ids"),
        (IDS | {"he": -1}, "ids"),
        (IDS | {"he": 256.0}, "ids"),
        (IDS | {BYTE_PIECES[1]: True}, "ids"),
        (IDS | {"he": "256"}, "ids"),
        (IDS | {"he": None}, "ids"),
        (IDS | {"he": [256]}, "ids"),
    ],
    ids=lambda value: "" if isinstance(value, str) else repr(value)[-24:],
)
def test_damaged_ids_are_refused(tmp_path, ids, why):
    message = refusal(written(tmp_path, ids))
    assert "encoder.json" in message and any(part in message for part in why.split("|"))


@pytest.mark.parametrize(
    ("merges", "why"),
    [
        ([*MERGES, "t h"], "line 5: 't h'"),
        (["h e", "Ġt h", *MERGES[1:]], "line 3: 'Ġt h'"),
        (["h e", "Ġth e", *MERGES[1:]], "line 3: 'Ġth e'"),
        (["h e", "Ġ the", *MERGES[1:]], "line 3: 'Ġ the'"),
        (["h e", "he ß", *MERGES[1:]], "line 3: 'he ß'"),
        (["h e", "he", *MERGES[1:]], "line 3: 'he'"),
        (["h e", "", *MERGES[1:]], "line 3: ''"),
        (["h e", "h e e", *MERGES[1:]], "line 3: 'h e e'"),
        (["h e", "h  e", *MERGES[1:]], "line 3: 'h  e'"),
        (["h e ", *MERGES[1:]], "line 2: 'h e '"),
        (["h\te", *MERGES[1:]], r"line 2: 'h\te'"),
        ([*MERGES, "x" * 10**6], "line 5"),
        ([*MERGES, "h e"], "twice"),
        (MERGES[:2], "no merge makes 'Ġthe'"),
        ([], "no merge makes"),
        ("\n".join(MERGES).encode(), "#version"),
        ("#version: 0.2\nh e\nĠ t".encode("utf-16"), "UTF-8"),
    ],
    ids=lambda value: "" if isinstance(value, str) else repr(value)[-24:],
)
def test_damaged_merges_are_refused(tmp_path, merges, why):
    message = refusal(written(tmp_path, merges=merges))
    assert "vocab.bpe" in message and why in message and len(message) < 400


@pytest.mark.parametrize("piece", ["", "xy", "é é", "<|中|>", "\ud800"], ids=ascii)
def test_a_piece_that_no_merge_makes_is_refused(tmp_path, piece):
    assert f"no merge makes {piece!r}" in refusal(written(tmp_path, IDS | {piece: 260}))


def test_a_merge_with_nothing_is_refused(tmp_path):
    assert "line 5: 'h '" in refusal(written(tmp_path, IDS | {"": 260}, [*MERGES, "h "]))


def test_a_file_cut_short_anywhere_is_refused(tmp_path):
    written(tmp_path)
    for name, step in (("encoder.json", 13), ("vocab.bpe", 1)):
        path = tmp_path / "m" / name
        whole = path.read_bytes()
        for length in {*range(0, len(whole), step), *range(len(whole) - 40, len(whole))} & {
            *range(len(whole.rstrip()))
        }:
            path.write_bytes(whole[:length])
            assert name in refusal(tmp_path)
        path.write_bytes(whole)


def test_a_flipped_bit_is_refused_or_gives_a_working_encoder(tmp_path):
    written(tmp_path)
    for name, step in (("encoder.json", 29), ("vocab.bpe", 1)):
        path = tmp_path / "m" / name
        whole = path.read_bytes()
        for bit in range(0, 8 * len(whole), step):
            flipped = bytearray(whole)
            flipped[bit // 8] ^= 1 << bit % 8
            path.write_bytes(flipped)
            try:
                small = get_encoder("m", tmp_path)
            except DamagedFile as error:
                assert str(tmp_path) in str(error)
            else:
                assert small.decode(small.encode("the heath\n")) == "the heath\n"
        path.write_bytes(whole)


# ---- the bundled vocabulary


def test_the_bundled_vocabulary_loads_and_gives_every_string_back(fairytale):
    assert len(fairytale.encoder) == 2048 and fairytale.end_of_text == 2047
    assert all(fairytale.decode(fairytale.encode(text)) == text for text in STRINGS)


@pytest.mark.parametrize("text", MEGABYTES.values(), ids=MEGABYTES)
def test_the_bundled_vocabulary_gives_a_megabyte_back(fairytale, text):
    assert fairytale.decode(fairytale.encode(text)) == text
