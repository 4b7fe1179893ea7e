"""Renders a folder of chat templates here and by transformers, and tells what differs.

    python -m tests.oracle.compare_chat_templates FOLDER

FOLDER holds .jinja files, such as llama.cpp's models/templates: other people's, so not committed.
"""

import argparse
import datetime
import sys
from pathlib import Path
from typing import Any

from transformers.utils import chat_template_utils

from jaxinfer.chat_template import ChatTemplate
from jaxinfer.errors import ConfigError, InvalidRequest

BOS, EOS = "<s>", "</s>"
NOW = datetime.datetime(2026, 3, 4, 5, 6, 7)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a place — “now”",
            "parameters": {
                "type": "object",
                "properties": {"place": {"type": "string", "description": "a town"}},
                "required": ["place"],
            },
        },
    }
]
USER = {"role": "user", "content": "Hello <b>you</b> & 'me' 你好"}
ANSWER = {"role": "assistant", "content": "Hi."}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": "call00001",
            "type": "function",
            "function": {"name": "weather", "arguments": {"place": "Köln"}},
        }
    ],
}
RESULT = {"role": "tool", "name": "weather", "tool_call_id": "call00001", "content": '{"t": 9}'}
CHATS: dict[str, tuple[list[dict[str, Any]], Any]] = {
    "user": ([USER], None),
    "system": ([{"role": "system", "content": "Be brief."}, USER], None),
    "turns": ([USER, ANSWER, USER], None),
    "user twice": ([USER, USER], None),
    "assistant first": ([ANSWER, USER], None),
    "tools": ([USER], TOOLS),
    "call": ([USER, CALL, RESULT], TOOLS),
    "call, answer": ([USER, CALL, RESULT, ANSWER, USER], TOOLS),
}


class Clock(datetime.datetime):
    @classmethod
    def now(cls, tz: Any = None) -> datetime.datetime:
        return NOW


def theirs(source: str, messages: list[dict[str, Any]], tools: Any) -> str:
    compiled: Any = chat_template_utils._compile_jinja_template(source)  # pyright: ignore[reportPrivateUsage]
    return compiled.render(
        messages=messages,
        tools=tools,
        documents=None,
        add_generation_prompt=True,
        bos_token=BOS,
        eos_token=EOS,
    )


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Compare how chat templates render.")
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args(argv).folder
    chat_template_utils.datetime = Clock
    count, refused, bad = 0, 0, 0
    for path in sorted(folder.glob("*.jinja")):
        source = path.read_text("utf-8")
        for name, (messages, tools) in CHATS.items():
            count += 1
            try:
                want, error = theirs(source, messages, tools), None
            except Exception as raised:
                want, error = None, raised
            try:
                template = ChatTemplate(source, bos_token=BOS, eos_token=EOS, clock=lambda: NOW)
                got = template.render(messages, tools=tools)
            except (InvalidRequest, ConfigError) as raised:
                refused += 1
                if want is not None or str(error).splitlines()[0] not in str(raised):
                    bad += 1
                    print(f"{path.name}, {name}: we say {raised}\n  they {error or 'render'}")
                continue
            if got != want:
                bad += 1
                print(f"{path.name}, {name}: {got!r}\n  they {want!r} {error}")
    print(f"{count} chats, {refused} refused, {bad} differ")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
