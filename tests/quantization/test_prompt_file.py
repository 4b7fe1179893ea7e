"""Prompts as people write them into a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxinfer.errors import ConfigError
from jaxinfer.quantization.prompt_file import read_prompts
from jaxinfer.quantization.standard_prompts import STANDARD_PROMPTS, Prompt, ask
from tests.tiny import TEMPLATE
from tests.tiny_tokenizers import byte_level, wrapped


def written(folder: Path, text: str) -> Path:
    path = folder / "prompts.txt"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_line_is_a_question_a_text_to_continue_or_a_conversation(tmp_path: Path):
    lines = [
        "Why is the sky blue?",
        "",
        '{"prompt": "Once upon a time"}',
        '{"messages": [{"role": "user", "content": "嗨"}]}',
        "{not JSON} is a text, too",
    ]
    assert read_prompts(written(tmp_path, "\r\n".join(lines))) == [
        ask("Why is the sky blue?"),
        Prompt(text="Once upon a time"),
        ask("嗨"),
        ask("{not JSON} is a text, too"),
    ]


@pytest.mark.parametrize(
    "line", ['{"prompt": 3}', '{"prompt": " "}', '{"messages": []}', '{"messages": ["a"]}', "{}"]
)
def test_json_of_another_form_is_refused_by_its_line(tmp_path: Path, line: str):
    with pytest.raises(ConfigError, match="line 2: expected"):
        read_prompts(written(tmp_path, f"a\n{line}"))


def test_a_file_without_prompts_or_without_text_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="holds no prompts"):
        read_prompts(written(tmp_path, "\n\n"))
    with pytest.raises(ConfigError, match="cannot be read"):
        read_prompts(tmp_path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="UTF-8"):
        read_prompts(tmp_path / "binary")


def test_the_standard_prompts_are_a_dozen_or_more_in_two_languages():
    assert len(STANDARD_PROMPTS) >= 12
    assert len({prompt.shown for prompt in STANDARD_PROMPTS}) == len(STANDARD_PROMPTS)
    assert sum("。" in prompt.shown or "？" in prompt.shown for prompt in STANDARD_PROMPTS) >= 3
    assert any(len(prompt.messages) > 2 for prompt in STANDARD_PROMPTS)
    assert any(not prompt.messages for prompt in STANDARD_PROMPTS)


def test_questions_go_through_the_template_where_there_is_one():
    chat, plain = wrapped(byte_level(), chat_template=TEMPLATE), wrapped(byte_level())
    question = ask("the cat")
    assert question.token_ids(plain) == plain.encode("the cat")
    text = chat.decode(question.token_ids(chat), skip_special_tokens=False)
    assert text == "<|im_start|>user\nthe cat<|im_end|>\n<|im_start|>assistant\n"
    assert Prompt(text="the cat").token_ids(chat) == chat.encode("the cat")
