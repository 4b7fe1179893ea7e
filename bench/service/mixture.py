"""Requests of every kind that the server knows, good and bad, from a seeded random generator."""

from __future__ import annotations

import json
from random import Random
from typing import Any

from bench.service.client import Call

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
WORDS = ["the", "cat", "sat", "on", "mat", "and", "dog", "log", "abc", "bca", "user", "system"]
PREFIX = "the cat sat on the mat, and the dog sat on the log. " * 3  # that many prompts share


def good_calls(number: int, seed: int) -> list[Call]:
    """`number` of them, each another. Their replies do not depend on chance: they name seeds."""
    random = Random(seed)
    return [_good(random, i) for i in range(number)]


def _good(random: Random, number: int) -> Call:
    text = f"{PREFIX if random.random() < 0.4 else ''}{number} {_words(random, 1, 60)}"
    body: dict[str, Any] = {"max_tokens": random.randint(1, 24), **_sampling(random, number)}
    if random.random() < 0.6:
        body["stream"] = True
        body["stream_options"] = {"include_usage": True}
    is_chat = random.random() < 0.5
    if random.random() < 0.5:
        body["logprobs"] = True if is_chat else random.randint(0, 3)
    if is_chat:
        return Call(CHAT, body | {"messages": [{"role": "user", "content": text}]})
    return Call(COMPLETIONS, body | {"prompt": text})


def _sampling(random: Random, number: int) -> dict[str, Any]:
    """Greedy, or drawn with a seed; sometimes filters, penalties, choices, stop strings."""
    fields: dict[str, Any] = {"temperature": 0}
    if random.random() < 0.6:
        fields = {"temperature": round(random.uniform(0.3, 1.5), 2), "seed": number}
        fields |= random.choice([{}, {"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.05}])
    if random.random() < 0.2:
        fields |= {"frequency_penalty": 0.5, "presence_penalty": -0.25}
    if random.random() < 0.15:
        fields["n"] = random.randint(2, 3)
    if random.random() < 0.3:
        fields["stop"] = random.choice([["a"], ["zzz"], ["th", " c"]])
    if random.random() < 0.2:
        fields["ignore_eos"] = True
    return fields


def _words(random: Random, low: int, high: int) -> str:
    return " ".join(random.choices(WORDS, k=random.randint(low, high)))


def bad_call(random: Random) -> Call:
    """One that must be refused with a status from 400 to 499."""
    good: dict[str, Any] = {"prompt": "the cat", "max_tokens": 4}
    broken: list[Any] = [
        b"{",
        b"\xff\xfe",
        b"[1, 2]",
        b"[" * 5000,
        {},
        good | {"model": f"no-{random.random()}"},
        good | {"temperature": random.choice([-1, 3, "hot"])},
        good | {"top_p": 0},
        good | {"max_tokens": random.choice([0, -1, "5", 1.5])},
        good | {"stop": ""},
        good | {"logit_bias": {"abc": 1}},
        good | {"stop_token_ids": [10**9]},
        good | {"n": 1000},
        good | {"prompt": ""},
        good | {"prompt": [[10**9]]},
        good | {"prompt": "cat " * 5000},
        good | {"stream_options": {"include_usage": True}},
    ]
    body = random.choice(broken)
    path = random.choice([COMPLETIONS, COMPLETIONS, f"/v1/{random.random()}"])
    return Call(path, body if isinstance(body, bytes) else json.dumps(body).encode())
