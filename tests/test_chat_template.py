"""Chat templates of the kinds that real checkpoints have, and what they refuse."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from jaxinfer.chat_messages import map_texts, plain_messages
from jaxinfer.chat_template import RESERVED_NAMES, ChatTemplate
from jaxinfer.errors import ConfigError, InvalidRequest

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe kind<|im_end|>\n' }}{% endif %}{{ '<|im_start|>' + message['role'] "
    "+ '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = """{{- bos_token }}
{%- set today = strftime_now("%d %b %Y") %}
{%- for message in messages %}
    {%- if message.role == 'system' %}
        {{- '<|start_header_id|>system<|end_header_id|>\n\nToday: ' + today + '\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
        {%- continue %}
    {%- endif %}
    {%- if 'tool_calls' in message %}
        {%- for call in message.tool_calls %}
            {{- '<|python_tag|>' + call.function.name + ' ' + call.function.arguments | tojson }}
        {%- endfor %}
    {%- else %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"""
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception("
    "'Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ '[INST] ' + message['content'] + ' [/INST]' }}{% elif message['role'] == 'assistant' %}"
    "{{ ' ' + message['content'] | trim + eos_token }}{% else %}"
    "{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)
THINKING = (
    "{% for m in messages %}<|im_start|>{% set c = m.content %}"
    "{% if m.role == 'assistant' and '</think>' in c %}{% set c = c.split('</think>')[-1] %}"
    "{% endif %}{{ m.role }}\n{{ c }}<|im_end|>{% endfor %}"
)
CONTROL = (
    "<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>",
    "<start_of_turn>", "<end_of_turn>", "[INST]", "[/INST]", "<s>", "</s>", "</think>",
)  # fmt: skip
ALTERNATE = "Conversation roles must alternate user/assistant/user/assistant/..."
NOON = datetime(2026, 7, 4, 12)


def template(source: str) -> ChatTemplate:
    return ChatTemplate(
        source, bos_token="<s>", eos_token="</s>", control_texts=CONTROL, clock=lambda: NOON
    )


def says(role: Any, content: Any = "hi", **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def test_chatml():
    text = template(CHATML).render([says("user", " Hello ")])
    assert text == (
        "<|im_start|>system\nBe kind<|im_end|>\n<|im_start|>user\n Hello <|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_llama_3_with_date_and_loop_controls():
    text = template(LLAMA3).render([says("system", " be kind\n"), says("user")])
    assert text == (
        "<s><|start_header_id|>system<|end_header_id|>\n\nToday: 04 Jul 2026\nbe kind<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )


def test_gemma_names_the_assistant_model():
    text = template(GEMMA).render(
        [says("user"), says("assistant", "yes\n"), says("user")], add_generation_prompt=False
    )
    assert text == (
        "<s><start_of_turn>user\nhi<end_of_turn>\n<start_of_turn>model\nyes<end_of_turn>\n"
        "<start_of_turn>user\nhi<end_of_turn>\n"
    )


def test_mistral_has_no_generation_prompt():
    text = template(MISTRAL).render([says("user"), says("assistant", " yes "), says("user", "b")])
    assert text == "<s>[INST] hi [/INST] yes</s>[INST] b [/INST]"


@pytest.mark.parametrize(
    ("source", "roles", "words"),
    [
        (GEMMA, ["system", "user"], "System role not supported"),
        (GEMMA, ["user", "user"], ALTERNATE),
        (MISTRAL, ["tool"], "Only user and assistant roles are supported!"),
    ],
)  # fmt: skip
def test_a_refusal_is_an_invalid_request_in_the_words_of_the_template(source, roles, words):
    refusing = template(source)
    for run in (refusing.render, refusing.render_marked):
        with pytest.raises(InvalidRequest) as error:
            run([says(role) for role in roles])
        assert error.value.message == words
        assert error.value.param == "messages"
    assert refusing.render([says("user")]).startswith("<s>")


@pytest.mark.parametrize(
    "source",
    ["{{ messages[0].content + 1 }}", "{{ messages[0].nothing.more }}", "{{ 1 // 0 }}"],
)
def test_a_failure_inside_the_template_is_an_invalid_request(source):
    with pytest.raises(InvalidRequest, match="the chat template failed on these messages"):
        template(source).render([says("user")])


def test_a_template_cannot_leave_its_sandbox_nor_change_the_messages():
    for source in ("{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}"):
        with pytest.raises(InvalidRequest, match="SecurityError"):
            template(source).render([says("user")])


@pytest.mark.parametrize("bad", ["{% if %}", "{{ x | no_such_filter }}", "{% endfor %}"])
def test_a_syntax_error_is_a_configuration_error_with_its_line(bad):
    with pytest.raises(ConfigError, match="line 3: "):
        template(f"a\n\n{bad}")


def test_json_is_written_as_it_is():
    text = template("{{ tools | tojson }}{{ tools | tojson(indent=1) }}").render(
        [says("user")], tools=[{"d": "é<'&>"}]
    )
    assert text == '[{"d": "é<\'&>"}]' + '[\n {\n  "d": "é<\'&>"\n }\n]'


def test_training_marks_and_blank_control_are_understood():
    body = "    {% generation %}\n{{ m.content }}{% endgeneration %}\n"
    source = "{% for m in messages %}\n" + body + "{% endfor %}"
    assert template(source).render([says("user"), says("assistant", "b")]) == "hib"


def test_kwargs_reach_the_template_but_not_under_our_names():
    assert (
        template("{{ enable_thinking }}").render([says("user")], enable_thinking=False) == "False"
    )
    with pytest.raises(InvalidRequest, match="may not set 'bos_token'"):
        template("").render([says("user")], bos_token="x")
    assert {"messages", "tools", "raise_exception"} <= RESERVED_NAMES


def test_text_parts_are_joined():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert plain_messages([says("user", parts)]) == [says("user", "a\nb")]


def test_other_parts_are_refused_by_name():
    parts = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {}}]
    with pytest.raises(InvalidRequest, match=r"messages\[1\]\.content\[1\] has type 'image_url'"):
        plain_messages([says("user"), says("user", parts)])


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "at least one message"),
        ("hi", "must be a list"),
        (None, "must be a list"),
        ([says("user"), "hi"], r"messages\[1\] must be an object; got 'hi'"),
        ([{"content": "a"}], r"messages\[0\]\.role must be a non-empty string; got None"),
        ([says(7)], r"role must be a non-empty string; got 7"),
        ([{"role": "user"}], r"content must be a string or a list of text parts; got None"),
        ([says("user", 5)], r"content must be a string .* got 5"),
        ([says("user", ["a"])], r"content\[0\] must be an object; got 'a'"),
        ([says("user", [{"type": "text"}])], r"content\[0\]\.text must be a string; got None"),
        ([says("user", [{"text": "a"}])], r"content\[0\] has type None"),
    ],
)  # fmt: skip
def test_malformed_messages_are_refused(messages, words):
    with pytest.raises(InvalidRequest, match=words) as error:
        plain_messages(messages)
    assert error.value.param == "messages"


def test_messages_nested_without_end_are_refused():
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(InvalidRequest, match="nested too deeply"):
        plain_messages([says("user", metadata=deep)])


def test_tool_calls_stand_in_for_content_and_their_arguments_are_objects():
    def call(arguments: Any) -> dict[str, Any]:
        return {"type": "function", "function": {"name": "f", "arguments": arguments}}

    given = [says("assistant", None, tool_calls=[call('{"x": "é"}'), call("{broken"), call("[1]")])]
    plain = plain_messages(given)
    functions = [entry["function"]["arguments"] for entry in plain[0]["tool_calls"]]
    assert functions == [{"x": "é"}, "{broken", "[1]"]
    assert plain[0]["content"] == ""
    assert given[0]["tool_calls"][0] == call('{"x": "é"}')
    assert '<|python_tag|>f {"x": "é"}' in template(LLAMA3).render([says("user"), *plain[:1]])
    with pytest.raises(InvalidRequest, match="content must be"):
        plain_messages([says("assistant", None)])


def test_map_texts_changes_every_text_and_nothing_else():
    value = {"a": ["b", 1, None, {"c": True}], "d": ("e",)}
    assert map_texts(value, str.upper) == {"A": ["B", 1, None, {"C": True}], "D": ["E"]}


@pytest.mark.parametrize("source", [CHATML, LLAMA3, GEMMA, MISTRAL, THINKING])
def test_marks_stand_in_what_messages_spell_and_nowhere_else(source):
    content = " a<|im_end|></s>[/INST] 日 <|eot_id|><end_of_turn></think> "
    calm = template(source).render([says("user", "-")])
    marked = template(source).render_marked([says("user", content)])
    assert marked.unmarked(marked.text) == template(source).render([says("user", content)])
    assert marked.text.count(marked.mark) == 6
    counts = [sum(text.count(word) for word in CONTROL) for text in (marked.text, calm)]
    assert counts[0] == counts[1]


def test_nothing_is_marked_where_no_message_spells_a_control_token():
    marked = template(CHATML).render_marked([says("user", "<b>")])
    assert not marked.is_marked
    assert marked.text == template(CHATML).render([says("user", "<b>")])


def test_the_mark_is_a_character_that_no_message_holds():
    content = "".join(map(chr, range(0xFDD0, 0xFDEE))) + "</s>"
    marked = template(CHATML).render_marked([says("user", content)])
    assert marked.mark not in content
    assert marked.text.count(marked.mark) == 1
    with pytest.raises(InvalidRequest, match="noncharacters"):
        template(CHATML).render_marked([says("user", content + "\ufdee\ufdef")])


def test_a_template_sees_the_control_token_that_it_looks_for_in_an_answer():
    said = says("assistant", "hm</think>yes<|im_end|>")
    marked = template(THINKING).render_marked([says("user", "</think>"), said])
    assert marked.unmarked(marked.text) == (
        "<|im_start|>user\n</think><|im_end|><|im_start|>assistant\nyes<|im_end|><|im_end|>"
    )
    assert f"user\n<{marked.mark}/think>" in marked.text
    assert f"yes<{marked.mark}|im_end|><|im_end|>" in marked.text


def test_a_control_token_that_changes_the_template_elsewhere_is_refused():
    source = "{% for m in messages %}{{ m.content.split('</s>')[0] }}{% endfor %}"
    assert template(source).render([says("user", "a</s>b")]) == "a"
    with pytest.raises(InvalidRequest, match=r"spell control tokens \(</s>\) that change"):
        template(source).render_marked([says("user", "a</s>b")])


@pytest.mark.parametrize(
    ("source", "content", "end"),
    [
        (CHATML, "the cat ", "assistant\nthe cat "),
        (LLAMA3, "the cat ", "<|end_header_id|>\n\nthe cat"),
        (LLAMA3, "", "<|end_header_id|>\n\n"),
        (LLAMA3, " \n", "<|end_header_id|>\n\n"),
        (MISTRAL, " the cat\n", "[/INST] the cat"),
        (THINKING, "hm</think> yes", "assistant\n yes"),
    ],
)
def test_a_continued_message_ends_where_its_text_ends(source, content, end):
    marked = template(source).render_marked(
        [says("user"), says("assistant", content)],
        add_generation_prompt=False,
        continue_final_message=True,
    )
    assert marked.unmarked(marked.text).endswith(end)


def test_continuing_excludes_a_generation_prompt():
    with pytest.raises(InvalidRequest, match="exclude each other") as error:
        template(CHATML).render_marked([says("assistant")], continue_final_message=True)
    assert error.value.param == "continue_final_message"


def test_a_message_that_the_template_does_not_print_cannot_be_continued():
    with pytest.raises(InvalidRequest, match="does not print the last message"):
        template("x").render_marked(
            [says("assistant")], add_generation_prompt=False, continue_final_message=True
        )
