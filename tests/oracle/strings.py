"""Strings whose token ids the golden file records, one difficulty each.

Plain data. For SmolLM2 the difficulties are: digits stand alone (all of Unicode's numbers, not
only ASCII's), runs of white space, bytes without a token (such as U+0004, which is dropped), and
texts that spell a control token.
"""

STRINGS = (
    # Words, case, contractions
    "Hello, world!",
    " hello",
    "hello ",
    "HELLO Hello hELLO heLLo",
    "I'm sure they'd've said it wasn't John's, we'll see, you're right",
    "I'M DON'T IT'S",
    "don’t ‘quote’ “quote”",
    "antidisestablishmentarianism",
    "a",
    "co-operate re-enter e-mail's",
    # White space
    " ",
    "  ",
    "\n",
    "\n\n\n",
    "\r\n\r\n",
    "\t\tindented\t once",
    "four    spaces and then   three",
    "trailing spaces   \nnext line  ",
    " \n \n  x",
    "no-break\u00a0space, thin\u2009space, ideographic\u3000space",
    "zero\u200bwidth\u200djoiner",
    "line\u2028separator\u0085next",
    # Digits and numbers
    "0",
    "1234567890",
    "3.14159 and 2,718,281",
    " 42 x7y 8z9",
    "2031-04-17T06:58:02Z",
    "½ cup, x² + y³, ٣٤٥, Ⅷ, ①②, 一二三, ५६",
    "0x1F4A9 1e-9 -17 +3",
    # Code
    "def f(x):\n    return x**2  # square\n",
    "for (int i = 0; i < n; ++i) { a[i] <<= 1; }",
    "SELECT * FROM users WHERE name LIKE '%o''Neil%';",
    '{"key": [1, 2.5, null, true], "nested": {"a": "b\\n"}}',
    '<div class="box">&amp;&lt;/div&gt;</div>',
    "git commit -m 'fix: a_b-c.d/e\\f' && echo $HOME",
    "snake_case camelCase PascalCase SCREAMING_CASE kebab-case",
    "!!! ??? ... --- *** ### ===> <=== !== ::",
    "\\frac{a}{b} \\sum_{i=0}^{n} x_i",
    # Other languages
    "Příliš žluťoučký kůň úpěl ďábelské ódy",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich",
    "¿Dónde está la niña? ¡Aquí!",
    "Съешь же ещё этих мягких французских булок",
    "Ξεσκεπάζω την ψυχοφθόρα βδελυγμία",
    "日本語のテキストです。カタカナ、ひらがな、漢字。",
    "今天天气很好，我们去公园吧！",
    "한국어 문장입니다.",
    "السلام عليكم ورحمة الله",
    "שלום עולם",
    "नमस्ते दुनिया",
    "สวัสดีชาวโลก",
    "Tiếng Việt có dấu",
    # Emoji, combining characters, rare planes
    "🙂 🌶️ 👍🏽 👩‍💻 🇨🇿",
    "🏴\U000e0067\U000e0062\U000e0065\U000e006e\U000e0067\U000e007f",
    "e\u0301 and \u00e9, A\u030a and \u00c5",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𝟙𝟚𝟛",
    "\ufeffbyte order mark",
    "replacement \ufffd character",
    "control \x00\x04\x1b[0m\x7f characters",
    # Spellings of control tokens
    "<|im_start|>user\nHi<|im_end|>\n",
    "<|endoftext|>",
    "a<|im_end|>b <|im_end|> c",
    "<|im_start <|im_start|im_end|>",
    "<repo_name>x<file_sep>y<empty_output>",
    "< |im_end|> <|IM_END|>",
)
