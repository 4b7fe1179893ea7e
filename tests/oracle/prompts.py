"""The 20 prompts of the golden file: varied in kind, and in length around page and tile borders.

Plain data and one rule for cutting; knows no model. A prompt is head + body + tail, of which only
the body is cut, by whole tokens, until the prompt has exactly `num_tokens`.
"""

from collections.abc import Callable
from dataclasses import dataclass

from tests.oracle import long_texts

SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


@dataclass(frozen=True, slots=True)
class Prompt:
    name: str
    num_tokens: int  # length of the whole prompt after cutting
    body: str
    head: str = ""
    tail: str = ""


def chat(name: str, num_tokens: int, *turns: str, system: str = SYSTEM) -> Prompt:
    """A ChatML prompt; `turns` alternate user, assistant, user, ... and the last one may be cut."""
    roles = ["system", *["user" if i % 2 == 0 else "assistant" for i in range(len(turns))]]
    said = [
        f"<|im_start|>{role}\n{content}<|im_end|>\n"
        for role, content in zip(roles, [system, *turns[:-1]], strict=False)
    ]
    tail = "<|im_end|>\n<|im_start|>assistant\n"
    return Prompt(name, num_tokens, turns[-1], "".join(said) + "<|im_start|>user\n", tail)


def fit(
    prompt: Prompt, encode: Callable[[str], list[int]], decode: Callable[[list[int]], str]
) -> tuple[str, list[int]]:
    """The prompt's text and token ids, exactly `prompt.num_tokens` of them.

    Raises: ValueError if the text is too short, or if a cut at that token changes the tokens before
        it or falls inside a character.
    """
    head, body, tail = encode(prompt.head), encode(prompt.body), encode(prompt.tail)
    room = prompt.num_tokens - len(head) - len(tail)
    text = prompt.head + decode(body[:room]) + prompt.tail
    token_ids = encode(text)
    if len(body) < room or token_ids != head + body[:room] + tail:
        raise ValueError(
            f"prompt {prompt.name!r} should have {prompt.num_tokens} tokens, of which {room} come "
            f"from its body of {len(body)}, but its text then has {len(token_ids)} tokens"
            f"{', not the same ones' if len(token_ids) == prompt.num_tokens else ''}; "
            "choose another length or text"
        )
    return text, token_ids


PROMPTS = (
    Prompt("capital", 5, "The capital of France is"),
    Prompt("powers", 17, "1, 2, 4, 8, 16, 32, 64, 128, 256"),
    Prompt(
        "rain",
        31,
        "It had rained for nine days, and on the tenth the mayor walked down to the river with a "
        "ruler in one hand and a loaf of bread in",
    ),
    Prompt(
        "french",
        33,
        "Le boulanger de notre rue ouvre à six heures, mais le dimanche il reste au lit et c'est "
        "sa fille qui vend les croissants",
    ),
    chat("chat-capital", 37, "What is the capital of France?"),
    Prompt(
        "python-short",
        63,
        "def median(values):\n"
        '    """Return the middle of the sorted values, or the mean of the two middle ones."""\n'
        "    ordered = sorted(values)\n    middle = len(ordered) // 2\n"
        "    if len(ordered) % 2 == 1:\n        return ordered[middle]\n    return (",
    ),
    Prompt(
        "german",
        64,
        "Der Zug nach Leipzig hatte vierzig Minuten Verspätung. Auf dem Bahnsteig stand eine Frau "
        "mit einem Käfig, in dem ein Papagei saß und schimpfte. Niemand wagte es, sie anzusehen,",
    ),
    chat(
        "chat-advice",
        65,
        "My tomato plants have yellow leaves at the bottom although I water them every day. "
        "What should I check first, and why? Please name at most three things, likely ones first.",
    ),
    Prompt(
        "json",
        96,
        '{\n  "orders": [\n    {"id": 1041, "item": "desk lamp", "count": 2, "price": 39.90},\n'
        '    {"id": 1042, "item": "bookshelf", "count": 1, "price": 129.00},\n'
        '    {"id": 1043, "item": "office chair", "count": 4, "price": 89.50},\n',
    ),
    Prompt("spanish", 127, long_texts.SPANISH),
    Prompt("japanese", 128, long_texts.JAPANESE),
    chat(
        "chat-pirate",
        129,
        "I have 3 boxes with 12 apples each and give 7 apples to my neighbour. On the way home I "
        "lose half of the rest, and my sister gives me 5 more. How many apples do I have then? "
        "Please write down every step of the calculation, one below the other. "
        "After that, tell me how many pies I can bake if one pie needs 4 apples, and how many "
        "apples are then left over for the parrot, the monkey and the cook, who likes apples.",
        system="You are a friendly pirate who teaches arithmetic. Answer in short sentences.",
    ),
    Prompt("czech", 192, long_texts.CZECH),
    Prompt("c", 255, long_texts.CODE_C),
    Prompt("russian", 256, long_texts.RUSSIAN),
    Prompt("log", 257, long_texts.LOG),
    chat(
        "chat-turns",
        511,
        "I want to keep bees. What do I need to begin with?",
        "Start with one or two hives, a veil, gloves, a smoker and a hive tool. Buy a small colony "
        "from a local keeper in spring, because it is used to your weather, and find out whether "
        "your town asks you to register it.",
        "How much time will it take every week?",
        "In spring and early summer plan about one hour for each hive and week, mostly to see "
        "whether the bees have enough room and whether they prepare to swarm. In autumn it is "
        "less, and in winter almost nothing.",
        "Write a short letter to my neighbours in which I explain the plan. This is what I have "
        "so far:\n\n" + long_texts.PROSE[:1500],
    ),
    Prompt("python", 512, long_texts.CODE_PYTHON),
    Prompt("prose", 513, long_texts.PROSE),
    Prompt("story", 700, long_texts.STORY),
)

# Texts whose log-probabilities the golden file records, from 2 to about 150 tokens.
SCORED_TEXTS = (
    "Hello world",
    "The quick brown fox jumps over the lazy dog, and the dog, for once, does not mind at all.",
    "import json\n\nwith open('settings.json') as file:\n    settings = json.load(file)\n",
    "Der Hund schläft unter dem Tisch, und die Katze sitzt am Fenster und schaut in den Regen.",
    "one two one two one two one two one two one two one two one two one two one two",
    long_texts.PROSE[:700],
)
