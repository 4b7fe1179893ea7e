"""Tokenizers built from GGUF metadata against the tokenizers that the metadata came from."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers

from checkpoints.errors import CheckpointError
from checkpoints.gguf_tokenizer import adds_bos, build_tokenizer, end_token_ids

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
PATH = Path("m.gguf")
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def byte_level(*first: pre_tokenizers.PreTokenizer, use_regex: bool = False):
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    return pre_tokenizers.Sequence([*first, last])


def split(pattern: str):
    return pre_tokenizers.Split(Regex(pattern), "isolated")


# The pre-tokenizers as the models' own tokenizer.json has them.
ORIGINALS = {
    "gpt-2": lambda: byte_level(use_regex=True),
    "smollm": lambda: byte_level(pre_tokenizers.Digits(individual_digits=True), use_regex=True),
    "llama-bpe": lambda: byte_level(split(WORDS + "{1,3}" + REST)),
    "qwen2": lambda: byte_level(split(WORDS + REST)),
}


@pytest.mark.parametrize("pre", ORIGINALS)
def test_encoding_equals_the_original_tokenizer(tiny, pre: str):
    original = tiny.byte_level(ORIGINALS[pre]())
    if pre == "qwen2":
        original.normalizer = normalizers.NFC()
    ours = build_tokenizer(PATH, tiny.vocabulary(original, pre).metadata())
    for text in tiny.texts:
        ids = original.encode(text).ids
        assert ours.encode(text).ids == ids, text
        assert ours.decode(ids, skip_special_tokens=False) == original.decode(
            ids, skip_special_tokens=False
        )
        assert ours.decode(ids) == original.decode(ids)


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "default"])
def test_decoding_an_encoded_text_gives_it_back(tiny, pre: str):
    tokenizer = build_tokenizer(PATH, tiny.vocabulary(tiny.byte_level(), pre).metadata())
    for text in tiny.texts:
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def pieces(tiny, pre: str | None, text: str) -> list[str]:
    metadata = tiny.vocabulary(tiny.byte_level(), pre).metadata()
    cut = build_tokenizer(PATH, metadata).pre_tokenizer
    assert cut is not None
    return [piece for piece, _ in cut.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["x", "Ġ12345", "Ġdon", "'t", "Ġa", "+", "b"]),
        ("smollm", ["x", "Ġ", "1", "2", "3", "4", "5", "Ġdon", "'t", "Ġa", "+", "b"]),
        ("llama-bpe", ["x", "Ġ", "123", "45", "Ġdon", "'t", "Ġa", "+b"]),
        ("qwen2", ["x", "Ġ", "1", "2", "3", "4", "5", "Ġdon", "'t", "Ġa", "+b"]),
        ("default", ["x", "Ġ", "123", "45", "Ġdon", "'", "t", "Ġa", "+", "b"]),
        (None, ["x", "Ġ", "123", "45", "Ġdon", "'", "t", "Ġa", "+", "b"]),
    ],
)
def test_each_pre_tokenizer_cuts_as_its_name_says(tiny, pre: str | None, expected: list[str]):
    assert pieces(tiny, pre, "x 12345 don't a+b") == expected


def test_an_unknown_pre_tokenizer_is_named(tiny):
    metadata = tiny.vocabulary(tiny.byte_level(), "megatron-9").metadata()
    with pytest.raises(CheckpointError, match=r"m\.gguf: .*ggml\.pre' .*found 'megatron-9'"):
        build_tokenizer(PATH, metadata)


def test_a_whole_word_that_is_a_token_needs_no_merges_for_llama3(tiny):
    vocabulary = tiny.vocabulary(tiny.byte_level(), "llama-bpe")
    vocabulary.tokens.append("zqx")
    vocabulary.types.append(NORMAL)
    last = len(vocabulary.tokens) - 1
    assert build_tokenizer(PATH, vocabulary.metadata()).encode("zqx").ids == [last]
    vocabulary.pre = "qwen2"
    assert build_tokenizer(PATH, vocabulary.metadata()).encode("zqx").ids != [last]


# Special tokens


def test_control_tokens_are_whole_and_are_skipped_in_decoding(tiny):
    tokenizer = build_tokenizer(PATH, tiny.vocabulary(tiny.byte_level(), "smollm").metadata())
    ids = tokenizer.encode("<|im_start|>user<|im_end|>").ids
    assert ids[0] == 1
    assert ids[-1] == 2
    assert 1 not in ids[1:]
    assert tokenizer.decode(ids) == "user"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|im_start|>user<|im_end|>"
    assert tokenizer.get_vocab_size() == 320


def test_user_defined_tokens_are_whole_but_ordinary_text(tiny):
    vocabulary = tiny.vocabulary(tiny.byte_level(), "smollm")
    vocabulary.tokens += ["<tool>", "    "]
    vocabulary.types += [USER_DEFINED, USER_DEFINED]
    tokenizer = build_tokenizer(PATH, vocabulary.metadata())
    ids = tokenizer.encode("a<tool>    b").ids
    assert 320 in ids
    assert 321 in ids
    assert tokenizer.decode(ids) == "a<tool>    b"


def test_encoding_never_adds_a_bos(tiny):
    vocabulary = tiny.vocabulary(tiny.byte_level(), "llama-bpe")
    vocabulary.extra |= {"add_bos_token": True, "add_eos_token": True}
    tokenizer = build_tokenizer(PATH, vocabulary.metadata())
    assert tokenizer.encode("a").ids == tokenizer.encode("a", add_special_tokens=False).ids
    assert tokenizer.encode("").ids == []


@pytest.mark.parametrize(
    ("model", "pre", "flag", "expected"),
    [
        ("gpt2", "smollm", None, False),
        ("gpt2", "smollm", True, True),
        ("gpt2", "llama-bpe", None, True),
        ("gpt2", "llama-bpe", False, False),
        ("llama", None, None, True),
        ("llama", None, False, False),
    ],
)
def test_whether_a_bos_belongs_in_front(model, pre, flag, expected):
    values = {"model": model, "pre": pre, "add_bos_token": flag}
    metadata = {f"tokenizer.ggml.{k}": v for k, v in values.items() if v is not None}
    assert adds_bos(PATH, metadata) is expected


def test_end_tokens_are_those_named_and_the_known_end_of_turn_controls():
    tokens = ["<s>", "</s>", "<|eot_id|>", "<|im_end|>", "x", "<|eom_id|>"]
    metadata = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [CONTROL, CONTROL, CONTROL, NORMAL, NORMAL, NORMAL],
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.eom_token_id": 5,
    }
    assert end_token_ids(metadata) == (1, 2, 5)  # "<|im_end|>" is ordinary text here
    assert end_token_ids(metadata | {"tokenizer.ggml.eos_token_id": 99}) == (2, 5)
    assert end_token_ids({}) == ()


# SentencePiece

LETTERS = "abcdefghijklmnopqrstuvwxyz▁.,"


def sentencepiece(tiny, *merged: str, extra: dict | None = None, letters: str = LETTERS):
    """<unk> <s> </s>, 256 bytes from id 3, merged pieces from 259 (best first), then letters."""
    tokens = ["<unk>", "<s>", "</s>"] + [f"<0x{i:02X}>" for i in range(256)]
    types = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256
    tokens += [*merged, *letters]
    types += [NORMAL] * (len(merged) + len(letters))
    scores = [0.0] * 259 + [-float(i) for i in range(len(tokens) - 259)]
    return tiny.Vocabulary("llama", tokens, types, scores=scores, extra=extra or {})


def greedy(vocabulary, text: str) -> list[int]:
    """SentencePiece's rule, spelled out: join the two with the best union, leftmost first."""
    ids = {t: i for i, t in enumerate(vocabulary.tokens) if vocabulary.types[i] == NORMAL}
    symbols = list("▁" + text.replace(" ", "▁")) if text else []
    while True:
        unions = [
            (vocabulary.scores[ids[a + b]], -i)
            for i, (a, b) in enumerate(pairwise(symbols))
            if a + b in ids
        ]
        if not unions:
            break
        at = -max(unions)[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    out = []
    for symbol in symbols:
        out += [ids[symbol]] if symbol in ids else [3 + byte for byte in symbol.encode()]
    return out


def test_merges_are_rebuilt_from_scores(tiny):
    # ▁ h e ▁ h e l l o: "he" first (best score), then "▁he" twice, "ll", "▁hell", and "o" is left.
    vocabulary = sentencepiece(tiny, "he", "▁he", "ll", "▁hell")
    tokenizer = build_tokenizer(PATH, vocabulary.metadata())
    letter_o = 259 + 4 + LETTERS.index("o")
    assert tokenizer.encode("he hello").ids == [260, 262, letter_o]
    assert tokenizer.decode([260, 262, letter_o]) == "he hello"


def test_the_better_score_wins_over_the_longer_piece(tiny):
    tokenizer = build_tokenizer(PATH, sentencepiece(tiny, "bc", "ab", "abc").metadata())
    assert tokenizer.encode("abc").tokens == ["▁", "abc"]
    tokenizer = build_tokenizer(PATH, sentencepiece(tiny, "bc", "ab").metadata())
    assert tokenizer.encode("abc").tokens == ["▁", "a", "bc"]


def test_bytes_stand_in_for_what_the_vocabulary_lacks(tiny):
    tokenizer = build_tokenizer(PATH, sentencepiece(tiny, "he").metadata())
    ids = tokenizer.encode("é\n").ids
    assert ids[1:] == [3 + 0xC3, 3 + 0xA9, 3 + 0x0A]
    assert tokenizer.decode(ids) == "é\n"


def test_random_texts_encode_as_the_spelled_out_rule_does(tiny):
    merged = [
        "he",
        "th",
        "▁t",
        "in",
        "er",
        "▁a",
        "the",
        "▁the",
        "an",
        "ll",
        "ing",
        "▁he",
        "on",
        "..",
        "...",
        "▁▁",
    ]
    vocabulary = sentencepiece(tiny, *merged)
    tokenizer = build_tokenizer(PATH, vocabulary.metadata())
    rng = np.random.default_rng(0)
    for _ in range(300):
        text = "".join(rng.choice(list("thehinganlo . é"), size=rng.integers(0, 40)))
        ids = tokenizer.encode(text).ids
        assert ids == greedy(vocabulary, text), text
        assert tokenizer.decode(ids) == text


def test_the_space_in_front_is_only_added_where_the_file_says_so(tiny):
    with_space = build_tokenizer(PATH, sentencepiece(tiny).metadata())
    assert with_space.encode("a b").tokens == ["▁", "a", "▁", "b"]
    metadata = sentencepiece(tiny, extra={"add_space_prefix": False}).metadata()
    without = build_tokenizer(PATH, metadata)
    assert without.encode("a b").tokens == ["a", "▁", "b"]
    assert without.decode(without.encode(" a b").ids) == " a b"


def test_user_defined_spaces_are_found_among_marks_of_the_texts_own(tiny):
    """As in Gemma: the converter wrote "▁▁" as two spaces."""
    vocabulary = sentencepiece(tiny, "▁a", extra={"add_space_prefix": False})
    vocabulary.tokens += ["  ", "\n\n"]
    vocabulary.types += [USER_DEFINED] * 2
    vocabulary.scores = [*(vocabulary.scores or []), 0.0, 0.0]
    tokenizer = build_tokenizer(PATH, vocabulary.metadata())
    two, newlines = len(vocabulary.tokens) - 2, len(vocabulary.tokens) - 1
    at = vocabulary.tokens.index
    for text in ("  a", " ▁a", "▁ a", "▁▁a"):
        assert tokenizer.encode(text).ids == [two, at("a")], text
    assert tokenizer.encode("a a\n\n   a").ids == [at("a"), at("▁a"), newlines, two, at("▁a")]
    assert tokenizer.decode([at("▁a"), two, at("a")]) == " a  a"


def test_a_sentencepiece_control_token_is_whole(tiny):
    tokenizer = build_tokenizer(PATH, sentencepiece(tiny).metadata())
    assert tokenizer.encode("a</s>b").tokens == ["▁", "a", "</s>", "▁", "b"]
    assert tokenizer.decode(tokenizer.encode("<s>a").ids) == "a"


# Damage


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": None}, "ggml.model' to be 'gpt2' or 'llama', found None"),
        ({"model": "bert"}, "found 'bert'"),
        ({"tokens": None}, "ggml.tokens' to be a list of texts"),
        ({"tokens": []}, "ggml.tokens' to be a list of texts"),
        ({"tokens": "abc"}, "ggml.tokens' to be a list of texts"),
        ({"token_type": [1, 1]}, "ggml.token_type' to be 320 numbers, found 2"),
        ({"merges": None}, "ggml.merges' to be a list of pairs"),
        ({"merges": ["ab"]}, "pairs with a space between, found 'ab'"),
        ({"merges": ["zzz yyy"]}, "pairs of known tokens"),
        ({"pre": 3}, "ggml.pre'"),
    ],
)
def test_broken_metadata_is_named(tiny, changes: dict, message: str):
    metadata = tiny.vocabulary(tiny.byte_level(), "smollm").metadata()
    metadata |= {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    with pytest.raises(CheckpointError) as caught:
        build_tokenizer(PATH, metadata)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_token_twice_is_named(tiny):
    vocabulary = tiny.vocabulary(tiny.byte_level(), "smollm")
    vocabulary.tokens[100] = vocabulary.tokens[99]
    with pytest.raises(CheckpointError, match=r"all different, found .* more than once"):
        build_tokenizer(PATH, vocabulary.metadata())


def test_scores_of_another_length_are_refused(tiny):
    metadata = sentencepiece(tiny).metadata() | {"tokenizer.ggml.scores": np.zeros(3)}
    with pytest.raises(CheckpointError, match=r"ggml\.scores' to be \d+ numbers, found 3"):
        build_tokenizer(PATH, metadata)
    del metadata["tokenizer.ggml.scores"]
    with pytest.raises(CheckpointError, match="found none"):
        build_tokenizer(PATH, metadata)


# The catalog's model, where it is already on this machine


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    path = Path.home() / ".cache/jaxinfer/models/smollm2-135m-instruct"
    path /= "SmolLM2-135M-Instruct.Q4_1.gguf"
    if not path.is_file():
        pytest.skip("smollm2-135m-instruct is not in the cache folder; `make serve` fetches it")
    from checkpoints.gguf import GGUFSource

    return build_tokenizer(path, GGUFSource(path).metadata)


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("The capital of France is", [504, 3575, 282, 4649, 314]),
        ("12345", [33, 34, 35, 36, 37]),
        ("<|im_start|>user\nhi<|im_end|>\n", [1, 4093, 198, 6004, 2, 198]),
    ],
)
def test_smollm2_gives_its_published_ids(smollm2: Tokenizer, text: str, ids: list[int]):
    assert smollm2.encode(text).ids == ids
    assert smollm2.decode(ids, skip_special_tokens=False) == text


def test_the_written_file_keeps_the_tokenizer(tmp_path: Path, tiny):
    from checkpoints.gguf import GGUFSource

    original = tiny.byte_level(ORIGINALS["smollm"]())
    path = tiny.gguf(tmp_path / "m.gguf", tiny.model(), tiny.vocabulary(original, "smollm"))
    ours = build_tokenizer(path, GGUFSource(path).metadata)
    assert json.loads(ours.to_str())["model"]["vocab"] == original.get_vocab(with_added_tokens=True)
    for text in tiny.texts:
        assert ours.encode(text).ids == original.encode(text).ids
