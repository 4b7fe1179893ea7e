"""2,200 texts that tokenizers are known to cut differently: always the same ones."""

from __future__ import annotations

import random
import unicodedata

COUNT = 2200


def _split(atoms: str) -> tuple[str, ...]:
    return tuple(atoms.split(" "))


ATOMS: dict[str, tuple[str, ...]] = {
    "words": _split(
        "the Hello WORLD camelCaseWord snake_case naïve e-mail "
        "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx"
    ),
    "contractions": _split("I'm DON'T they'd've it’s l'été 's 'LL we'RE ſ'ſ"),
    "digits": _split("0 42 1234567 3.14 1,000,000 ٣٤٥ १२३ ½ ²³ Ⅷ ① １２３４"),
    "cjk": _split("中文 漢字仮名 日本語の文章です。 「引用」 你好，世界！ 𠮷野家 ㄅㄆㄇ 々"),
    "kana and hangul": _split("カタカナ ひらがな ｶﾀｶﾅ 한국어 조선말 한 ー〜"),
    "emoji": _split(
        "🙂 \U0001f469\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466 👍🏽 "
        "\U0001f3f3\ufe0f\u200d\U0001f308 🇩🇪🇫🇷 \u2764\ufe0f ☺ 1\ufe0f\u20e3 "
        "\U0001f9d1\U0001f3ff\u200d\U0001f680 🫠"
    ),
    "right to left": _split(
        "שלום \u05e9\u05b8\u05c1\u05dc\u05d5\u05b9\u05dd مرحبا "
        "\u0645\u064f\u062d\u064e\u0645\u064e\u0651\u062f \u200fabc\u200e "
        "\u067e\u0627\u0631\u0633\u06cc\u200c\u0647\u0627 ٪؟"
    ),
    "scripts": _split(
        "Привет Ελλάδα \u0939\u093f\u0928\u094d\u0926\u0940 "
        "\u0ba4\u0bae\u0bbf\u0bb4\u0bcd ไทยภาษา ქართული ԱբԳ ᏣᎳᎩ አማርኛ ǅ"
    ),
    "marks": _split("e\u0301 é A\u030a Å n\u0303o \u0301 a\u0300\u0301\u0302 ﬁ \u1e9b\u0323"),
    "blanks": (
        " ",
        "  ",
        "     ",
        "\t",
        "\t\t",
        "\n",
        "\n\n\n",
        "\r\n",
        " \n ",
        "\xa0",
        "\u2003",
        "\u3000",
        "\u200b",
        "\u2028",
        "\x85",
        "\x0b\x0c",
        "                 ",
        "\n \n\t",
    ),
    "controls": _split("\x00 \x01 \x07 \x1b[0m \x7f \u200d \u200c \ufeff \ufffd \ue000"),
    "punctuation": _split("... ?! -- — “” «» ((( ]}> /* // != <=> $$ ^~|` …"),
    "symbols": _split("€ ™ ∑ → °C § ¬ ½¾ ⌘ ♪ 𐍈 𝕳 ℃"),
    "code": (
        "def f(x):\n    return x**2\n",
        "for(int i=0;i<n;++i){",
        "#include <a.h>",
        "a->b",
        "x = y[1:]",
        "https://a.example/b?c=d&e=%20",
        "user@example.com",
        "C:\\dir\\file.txt",
        '{"k": [1, null]}',
    ),
    "look-alikes": (
        "<|im_start|>",
        "<|im_end",
        "|im_end|>",
        "< |eot_id|>",
        "<s>",
        "</s>",
        "[INST]",
        "<unk>",
        "<0x0A>",
        "▁",
        "▁▁the",
        "Ġthe",
        "<think>",
        "<|endoftext|>",
        "<EOS>",
    ),
}
JOINTS = ("", "", "", " ", " ", "  ", "\n", "'", "-", ".", ",")


def nasty_strings() -> list[str]:
    """Each atom alone and between blanks, then mixtures of up to eight."""
    rng = random.Random(20260101)
    atoms = [atom for group in ATOMS.values() for atom in group]
    texts = dict.fromkeys(["", *atoms, *(f" {atom} " for atom in atoms), *(a + a for a in atoms)])
    groups = list(ATOMS)
    while len(texts) < COUNT:
        chosen = rng.sample(groups, rng.randint(1, 4))
        parts = [rng.choice(ATOMS[rng.choice(chosen)]) for _ in range(rng.randint(2, 8))]
        text = "".join(part + rng.choice(JOINTS) for part in parts)
        form = rng.choice((None, None, None, "NFC", "NFD"))
        texts[unicodedata.normalize(form, text) if form else text] = None
    return list(texts)
