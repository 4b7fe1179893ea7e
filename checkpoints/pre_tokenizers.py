"""How byte-level tokenizers cut text into words before they merge bytes, by the names that GGUF
files give it (`tokenizer.ggml.pre`; llama.cpp named them).

The rules are those of the models' own tokenizer.json. Names that are not here belong to encoders,
to models that nothing here runs, or to rules that no pattern can say.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
MARKS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3_WORDS = rf"{CONTRACTIONS}|{WORD}|\p{{N}}{{1,3}}|{MARKS}|{BLANKS}"
QWEN2_WORDS = rf"{CONTRACTIONS}|{WORD}|\p{{N}}|{MARKS}|{BLANKS}"
QWEN35_WORDS = (
    rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{BLANKS}"
)
ONE_DIGIT, THREE_DIGITS = r"\p{N}", r"\p{N}{1,3}"
# A word of gpt-4o is of capitals and then of small letters, or of letters without case.
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_FIRST = r"[^\r\n\p{L}\p{N}]?"
_CASED = rf"{_FIRST}{_UPPER}*{_LOWER}+%s|{_FIRST}{_UPPER}+{_LOWER}*%s"
_CASED_MARKS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
GPT4O_WORDS = (
    rf"{_CASED % (CONTRACTIONS + '?', CONTRACTIONS + '?')}|{THREE_DIGITS}|{_CASED_MARKS}|{BLANKS}"
)
TEKKEN_WORDS = rf"{_CASED % ('', '')}|{ONE_DIGIT}|{_CASED_MARKS}|{BLANKS}"
DEEPSEEK3_WORDS = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
) + BLANKS
BLOOM_WORDS = r" ?[^(\s|.,!?…。，、।۔،)]+"
_HAN_KANA = r"[一-龥぀-ゟ゠-ヿ]+"
_DEEPSEEK_CJK = r"[一-龥ࠀ-一가-퟿]+"
# Letters with case, as DeepSeek's first tokenizer lists them.
_LETTERS = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚ"
    "Ḁ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻ"
    "Ȿ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """How text is cut before the merges: each pattern cuts what the ones before it left."""

    patterns: tuple[str, ...]
    adds_bos: bool = False  # where the file does not say
    ignores_merges: bool = False  # a whole word that is a token is taken as it is
    is_nfc: bool = False


_GPT2 = PreTokenizer((GPT2_WORDS,))
_DIGITS = PreTokenizer((ONE_DIGIT, GPT2_WORDS))
_LLAMA3 = PreTokenizer((LLAMA3_WORDS,), adds_bos=True, ignores_merges=True)
_QWEN2 = PreTokenizer((QWEN2_WORDS,), is_nfc=True)
_QWEN2_AS_IT_IS = PreTokenizer((QWEN2_WORDS,))
_GLM = PreTokenizer((LLAMA3_WORDS,))
_DEEPSEEK3 = PreTokenizer((THREE_DIGITS, _HAN_KANA, DEEPSEEK3_WORDS))
_GPT4O = PreTokenizer((GPT4O_WORDS,))
_BLOOM = PreTokenizer((BLOOM_WORDS,))
_BAILING = PreTokenizer((rf"'(?i:[sdmt]|ll|ve|re)|{WORD}|\p{{N}}|{MARKS}|\s*[\r\n]|\s+(?!\S)|\s+",))

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "default": PreTokenizer((r"[\p{P}$+<=>^~|]+", GPT2_WORDS, r"\p{N}+", r"[0-9][0-9][0-9]")),
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "mpt", "jais", "trillion"), _GPT2),
    **dict.fromkeys(("granite-docling", "exaone4", "gigachat", "a.x-4.0", "mellum"), _GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), _DIGITS),
    **dict.fromkeys(("exaone", "minerva-7b", "mellum2"), _DIGITS),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1"), _LLAMA3),
    **dict.fromkeys(("pixtral", "midm-2.0", "lfm2"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), _GLM),
    **dict.fromkeys(("glm4", "glm5"), replace(_GLM, ignores_merges=True)),
    "minicpm5": PreTokenizer(
        (THREE_DIGITS, LLAMA3_WORDS.replace(THREE_DIGITS, r"\p{N}+")), ignores_merges=True
    ),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "kormo", "megrez"), _QWEN2),
    **dict.fromkeys(
        ("stablelm2", "hunyuan", "solar-open", "grok-2"), replace(_QWEN2, is_nfc=False)
    ),
    "qwen35": PreTokenizer((QWEN35_WORDS,), is_nfc=True),
    "ufakzeka": PreTokenizer((rf"{WORD}|\p{{N}}|{MARKS}|{BLANKS}",)),
    "laguna": PreTokenizer((r"[^\n]+|[\n]+", QWEN2_WORDS)),
    "seed-coder": PreTokenizer(
        (rf"{CONTRACTIONS}|{WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{BLANKS}",)
    ),
    "exaone-moe": PreTokenizer(
        (
            rf"{CONTRACTIONS}|{_FIRST}(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
            r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
        )
    ),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), _BAILING),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"), _DEEPSEEK3),
    "deepseek-coder": PreTokenizer(
        (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_CJK, ONE_DIGIT)
    ),
    "deepseek-llm": PreTokenizer(
        (
            r"[\r\n]",
            rf"\s?[{_LETTERS}]+",
            r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
            r"\s+$",
            _DEEPSEEK_CJK,
            r"\p{N}+",
        )
    ),
    "falcon": PreTokenizer((r"[\p{P}$+<=>^~|`]+", GPT2_WORDS, r"[0-9][0-9][0-9]")),
    **dict.fromkeys(("bloom", "poro-chat", "gpt3-finnish"), _BLOOM),
    "viking": PreTokenizer((BLOOM_WORDS, ONE_DIGIT)),
    "tekken": PreTokenizer((TEKKEN_WORDS,), adds_bos=True, ignores_merges=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), _GPT4O),
}
