"""Byte-level byte-pair encoding (BPE): text -> token ids and back, with GPT-2's two vocabulary files.

The idea: there is a list of merges, "these two neighbours become one piece", the most useful first. To encode a text

1. cut it into words, a space going with the word behind it; no piece ever reaches across a cut;
2. write each word as its UTF-8 bytes, one piece a byte, so that no text is out of reach;
3. find the earliest merge of the list that fits any two neighbours, make it wherever it fits from left to right, and
   search again, until none fits;
4. look up the ids of the pieces that are left.

With OpenAI's merges " water" goes  Ġ w a t e r  ->  Ġ w a t er  ->  Ġ w at er  ->  Ġw at er  ->  Ġw ater  ->  Ġwater.

`encoder.json` maps each piece to its id; `vocab.bpe` lists the merges, "left right" on a line, under a line with the
version. Both write a byte as one character: the printable ones of Latin-1 as they are, the rest as U+0100 and up (Ġ is
the space). Nothing in a text is special: "<|endoftext|>" in it is spelled like any other word, as in OpenAI's encoder.
"""

import functools
import heapq
import json
import os

import regex

from errors import DamagedFile

# GPT-2's words: English endings such as 'll, letters, digits, other marks, and white space but the last before a word.
WORD = regex.compile(r"'(?:s|t|re|ve|m|ll|d)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")

# Code points for the bytes that aren't printable in Latin-1: controls, the two spaces, the soft hyphen.
CODE_POINT = {byte: 0x100 + n for n, byte in enumerate([*range(0x21), *range(0x7F, 0xA1), 0xAD])}
BYTE = {code_point: byte for byte, code_point in CODE_POINT.items()}
BYTE_PIECES = bytes(range(256)).decode("latin-1").translate(CODE_POINT)

END_OF_TEXT = "<|endoftext|>"
SPECIAL = regex.compile(r"<[!-~]+>|\[[!-~]+\]")  # pieces that no merge makes: that one, and what others added, as <pad>

# How many words the cache holds and how many characters each at most: 10 MB of ordinary words, 60 MB of the worst.
CACHED_WORDS, CACHED_LENGTH = 2**15, 32


def merge(word, ranks):
    """The pieces that `word` (one character a byte) ends up as when no merge fits any more, in order.

    `ranks` maps "left right", two pieces with a space between them, to the place of their merge in the list.

    Searching the whole word after every merge takes n^2 steps, hours for a megabyte. So we note where a merge fits when
    its two pieces become neighbours, and keep the merges that fit in a heap, the earliest on top: n log n steps. By the
    time a merge is on top, others may have taken its pieces, so each note is checked before it is followed.
    """
    n = len(word)
    pieces = [*word, ""]  # the piece that starts at each place, "" where none does (any more)
    after, before = [*range(1, n + 1), 0], [n, *range(n)]  # the next place with a piece: a ring, closed by the last ""
    notes, heap = {}, []  # "left right" -> the places where it was seen; (rank, "left right")
    fresh = range(n)  # the places where a new pair of neighbours begins
    while True:
        for place in fresh:
            pair = f"{pieces[place]} {pieces[after[place]]}"
            if pair in ranks:
                if pair not in notes:
                    notes[pair] = []
                    heapq.heappush(heap, (ranks[pair], pair))
                notes[pair].append(place)
        if not heap:
            return [piece for piece in pieces if piece]
        _, pair = heapq.heappop(heap)
        left, right = pair.split(" ")
        both, fresh = left + right, []
        for place in sorted(notes.pop(pair)):
            gone = after[place]
            if pieces[place] == left and pieces[gone] == right:
                pieces[place], pieces[gone] = both, ""
                after[place] = after[gone]
                before[after[gone]] = place
                fresh += before[place], place


def spell(text):
    """The bytes of a text as one character each, the way pieces are written."""
    return text.encode("utf-8", "replace").decode("latin-1").translate(CODE_POINT)


class Encoder:
    """OpenAI's interface: `encoder` maps pieces to ids, `decoder` ids to pieces. `ranks`: see `merge`.

    `end_of_text`: the id at which a text ends, or a tuple of several ids or of none. `begin_of_text`: the id that an
    empty prompt starts from, or None where the model has none.
    Nothing changes after construction but a cache of words, which is bounded.
    """

    def __init__(self, encoder, ranks, end_of_text, begin_of_text):
        self.encoder, self.decoder = encoder, {i: piece for piece, i in encoder.items()}
        self.end_of_text, self.begin_of_text = end_of_text, begin_of_text
        self.ranks = ranks
        self._cached_word_ids = functools.lru_cache(CACHED_WORDS)(self._word_ids)

    def _word_ids(self, word):
        return tuple([self.encoder[piece] for piece in merge(spell(word), self.ranks)])

    def encode(self, text):
        """The ids of a str, a list of int. A lone surrogate, which is half a character, counts as U+FFFD."""
        text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        ids = []
        for word in WORD.findall(text):
            ids += self._cached_word_ids(word) if len(word) <= CACHED_LENGTH else self._word_ids(word)
        return ids

    def encode_prompt(self, text):
        """encode, and for an empty text the token that begins one; ValueError where the model has none."""
        ids = self.encode(text)
        if not ids and self.begin_of_text is None:
            raise ValueError("the prompt is empty, and this model has no token that begins a text: write something")
        return ids or [self.begin_of_text]

    def decode_bytes(self, ids):
        """The bytes that ids stand for. They may begin or end inside a character: its bytes may be several tokens.
        ValueError for an id that isn't in the vocabulary."""
        try:
            return "".join([self.decoder[i] for i in ids]).translate(BYTE).encode("latin-1")
        except KeyError as error:
            raise ValueError(f"no token has the id {error.args[0]}: ids are 0 to {len(self.decoder) - 1}") from None

    def decode(self, ids):
        """The text that ids stand for, a str; bytes that aren't UTF-8 become U+FFFD. ValueError: see `decode_bytes`."""
        return self.decode_bytes(ids).decode("utf-8", "replace")


def get_encoder(model_name, models_dir):
    """The Encoder of `models_dir/model_name/encoder.json` and `vocab.bpe` (their format: at the top of this file).

    OSError naming the file if one can't be read; its subclass DamagedFile if one isn't what it should be.
    """
    ids = read_ids(os.path.join(models_dir, model_name, "encoder.json"))
    ranks = read_ranks(os.path.join(models_dir, model_name, "vocab.bpe"), ids)
    return Encoder(ids, ranks, ids[END_OF_TEXT], ids[END_OF_TEXT])


def read_utf8(path):
    try:
        with open(path, encoding="utf-8-sig") as file:  # with or without a byte-order mark, whatever the line ends
            return file.read()
    except UnicodeDecodeError:
        raise DamagedFile(f"{path} isn't UTF-8 text") from None


def read_object(path):
    """The dict that a JSON file holds. OSError, DamagedFile."""
    with open(path, "rb") as file:
        data = file.read()
    try:
        content = json.loads(data.decode("utf-8-sig"))  # with or without a byte-order mark
    except (ValueError, RecursionError):
        raise DamagedFile(f"{path} isn't JSON") from None
    if not isinstance(content, dict):
        raise DamagedFile(f"{path} doesn't hold a JSON object")
    return content


def read_ids(path):
    """`encoder.json` as a dict from pieces to ids; DamagedFile unless it spells every text and ids are 0, 1, 2 ..."""
    ids = read_object(path)
    for piece in (*BYTE_PIECES, END_OF_TEXT):
        if piece not in ids:
            raise DamagedFile(f"{path}: the piece {piece!r} is missing")
    if set(map(type, ids.values())) != {int} or sorted(ids.values()) != list(range(len(ids))):
        raise DamagedFile(f"{path}: the ids of its {len(ids)} pieces aren't 0, 1, 2 and so on, each once")
    return ids


def read_ranks(path, ids):
    """`vocab.bpe` as a dict from "left right" to the line it is on; the pieces must be the same as those of `ids`."""
    version, *merges = read_utf8(path).rstrip("\n").split("\n")
    if not version.startswith("#version"):
        raise DamagedFile(f"{path} doesn't begin with #version")
    ranks = rank(path, merges, ids)
    if len(ranks) < len(merges):
        raise DamagedFile(f"{path}: a merge is there twice")
    for piece in unmade(ids, ranks):
        if not SPECIAL.fullmatch(piece):
            raise DamagedFile(f"{path}: no merge makes {piece[:80]!r}, which has an id; was the file cut short?")
    return ranks


def rank(path, merges, ids):
    """The dict from "left right" to its line in the file, where the first merge is on line 2. DamagedFile for a merge
    whose pieces have no ids."""
    ranks = {}
    for number, pair in enumerate(merges, 2):
        left, _, right = pair.partition(" ")
        both = left + right
        if not (left and right and left in ids and right in ids and both in ids):
            raise DamagedFile(f"{path}, line {number}: {pair[:80]!r} isn't two pieces that make a third, all with ids")
        ranks[pair] = number
    return ranks


def unmade(ids, ranks):
    """The pieces, in order of their letters, that are no byte and that no merge makes."""
    return sorted(ids.keys() - {*BYTE_PIECES, *(pair.replace(" ", "") for pair in ranks)})
