"""Chat messages -> prompt text, through the checkpoint's own Jinja template.

Host only: no JAX here, and no token ids. The template is the operator's; it runs in a sandbox all
the same. Messages are the client's, and may spell control tokens. `render_marked` therefore tells
apart what the template wrote and what the client wrote: it renders twice, once with the real texts
and once with a mark character inside every control token that a client's text spells. The two must
agree but for the marks, so the prompt is always exactly what the template makes of the real texts,
whatever it trims, splits or inspects.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any, NoReturn

import jinja2
import jinja2.meta
import jinja2.nodes
import jinja2.parser
from jinja2.ext import Extension, LoopControlExtension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jaxinfer.chat_messages import map_texts, plain_messages
from jaxinfer.control_tokens import ControlTexts
from jaxinfer.errors import ConfigError, InvalidRequest

# Set by us; a request's template kwargs may not carry them.
_MESSAGE_NAMES = {"messages", "tools", "add_generation_prompt", "continue_final_message"}
_TEMPLATE_NAMES = {"bos_token", "eos_token", "raise_exception", "strftime_now"}
RESERVED_NAMES = frozenset(_MESSAGE_NAMES | _TEMPLATE_NAMES)
_NONCHARACTERS = tuple(map(chr, range(0xFDD0, 0xFDF0)))  # Unicode: never for interchange
_TAIL = " \t "  # behind the end of a message that is to be continued: gone if the template trims


@dataclass(frozen=True, slots=True)
class MarkedText:
    """A rendered prompt; what the client wrote in it never reads as a control token.

    #  text:  <|im_start|>user\\n  <*|im_end|>  <|im_end|>\\n      (* is `mark`)
    #         the template's       a client's  the template's
    """

    text: str
    mark: str  # one character that occurs in no input

    @property
    def is_marked(self) -> bool:
        return self.mark in self.text

    def unmarked(self, part: str) -> str:
        return part.replace(self.mark, "")


class ChatTemplate:
    """One template, compiled.

    Args:
        source: the Jinja text.
        bos_token, eos_token: what the template sees under these names; None reads as "".
        control_texts: the texts of control tokens, for `render_marked`.
        clock: for the template's strftime_now.
    Raises: ConfigError with the line of a syntax error.
    """

    def __init__(
        self,
        source: str,
        *,
        bos_token: str | None,
        eos_token: str | None,
        control_texts: Sequence[str] = (),
        clock: Callable[[], datetime] = datetime.now,
    ):
        self.source = source
        self._knows_developer = "developer" in source
        self._tokens = {"bos_token": bos_token or "", "eos_token": eos_token or ""}
        self._control = ControlTexts(control_texts)
        self._clock = clock
        try:
            self._template = _environment().from_string(source)
        except RecursionError:
            raise ConfigError(
                "the chat template does not compile: it is nested too deeply; correct it, or give "
                "another one with --chat-template"
            ) from None
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(
                f"the chat template does not compile: line {error.lineno}: {error.message}; "
                "correct it, or give another one with --chat-template"
            ) from error

    @cached_property
    def reads_tools(self) -> bool:
        """Whether tools can make a difference to the prompt."""
        names = jinja2.meta.find_undeclared_variables(_environment().parse(self.source))
        return "tools" in names

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """The prompt as the template writes it.

        Raises: InvalidRequest with the template's own message if it refuses the messages
            (raise_exception), or saying what is wrong with them.
        """
        inputs = self._inputs(messages, tools, kwargs)
        return self._run(inputs, add_generation_prompt, self._clock())

    def render_marked(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> MarkedText:
        """Like `render`, with marks in the control tokens that messages, tools or kwargs spell.

        A template may look for a control token in what the assistant said ("</think>", say); such a
        text then stays unmarked in assistant messages, and only there.
        With `continue_final_message` the prompt ends where the last message's text ends.

        Raises: InvalidRequest as `render` does, and if a control token that a client spelled
            changes the course of the template elsewhere.
        """
        if add_generation_prompt and continue_final_message:
            raise InvalidRequest(
                "continue_final_message and add_generation_prompt exclude each other; "
                "set add_generation_prompt to false",
                param="continue_final_message",
            )
        inputs = self._inputs(messages, tools, kwargs)
        mark, end = _unused_characters(inputs)
        final = inputs["messages"][-1]
        content: str = final["content"]
        if continue_final_message:
            final["content"] = content + end + _TAIL
        now = self._clock()

        def run(values: dict[str, Any]) -> str:
            return self._run(values, add_generation_prompt, now)

        text = _marked_render(run, inputs, self._control, mark)
        return MarkedText(_cut_at(end, text, content) if continue_final_message else text, mark)

    def _inputs(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        kwargs: Mapping[str, Any],
    ) -> dict[str, Any]:
        for name in kwargs:
            if name in RESERVED_NAMES:
                raise InvalidRequest(
                    f"chat_template_kwargs may not set {name!r}", param="chat_template_kwargs"
                )
        plain = plain_messages(messages)
        for message in plain:
            if message["role"] == "developer" and not self._knows_developer:
                message["role"] = "system"
        return {"messages": plain, "tools": list(tools) if tools else None, **kwargs}

    def _run(self, inputs: Mapping[str, Any], add_generation_prompt: bool, now: datetime) -> str:
        try:
            return self._template.render(
                inputs,
                add_generation_prompt=add_generation_prompt,
                strftime_now=now.strftime,
                raise_exception=_raise_exception,
                **self._tokens,
            )
        except _Refusal as error:
            raise InvalidRequest(str(error.message), param="messages") from error
        except Exception as error:  # whatever a template's own operations raise on odd messages
            raise InvalidRequest(
                f"the chat template failed on these messages: {type(error).__name__}: {error}",
                param="messages",
            ) from error


def _unused_characters(inputs: Mapping[str, Any]) -> tuple[str, str]:
    seen: set[str] = set()
    map_texts(inputs, lambda text: seen.update(c for c in _NONCHARACTERS if c in text) or text)
    free = [c for c in _NONCHARACTERS if c not in seen]
    if len(free) < 2:
        raise InvalidRequest(
            "the messages hold nearly all of the noncharacters U+FDD0..U+FDEF, which no text "
            "needs; remove them",
            param="messages",
        )
    return free[0], free[1]


def _cut_at(end: str, text: str, content: str) -> str:
    """`text` up to `end`, which follows `content`; its last blanks go if the template trims."""
    place = text.rfind(end)
    if place < 0:
        raise InvalidRequest(
            "the chat template does not print the last message, so it cannot be continued",
            param="continue_final_message",
        )
    is_trimmed = not text.startswith(_TAIL, place + 1)
    stripped = content.rstrip()
    blanks = content[len(stripped) :] if is_trimmed and stripped else ""
    return text[:place].removesuffix(blanks)


def _marked_render(
    run: Callable[[dict[str, Any]], str], inputs: dict[str, Any], control: ControlTexts, mark: str
) -> str:
    real = run(inputs)

    def attempt(general: ControlTexts, said: ControlTexts) -> str | None:
        """With marks, `said` holding for assistant messages; None if the template noticed."""
        marked = map_texts(inputs, lambda text: general.broken(text, mark))
        for i, message in enumerate(inputs["messages"]):
            if message["role"] == "assistant":
                marked["messages"][i] = map_texts(message, lambda text: said.broken(text, mark))
        if marked == inputs:
            return real
        try:
            text = run(marked)
        except InvalidRequest:
            return None
        return text if text.replace(mark, "") == real else None

    if (text := attempt(control, control)) is not None:
        return text
    nothing = ControlTexts(())
    found: set[str] = set()
    map_texts(inputs, lambda text: found.update(control.found(text)) or text)
    noticed = {word for word in found if attempt(nothing, ControlTexts([word])) is None}
    if (text := attempt(control, control.without(noticed))) is not None:
        return text
    raise InvalidRequest(
        f"the messages spell control tokens ({', '.join(sorted(found))}) that change how the chat "
        "template reads them; remove them from the messages",
        param="messages",
    )


class _Refusal(jinja2.TemplateError):
    """The template called raise_exception."""


def _raise_exception(message: str) -> NoReturn:
    raise _Refusal(message)


def _tojson(value: Any, indent: int | None = None, **options: Any) -> str:
    """Unlike Jinja's own: no HTML or ASCII escapes, so models see what they were trained on."""
    return json.dumps(
        value, ensure_ascii=options.pop("ensure_ascii", False), indent=indent, **options
    )


class _GenerationBlocks(Extension):
    """{% generation %} … {% endgeneration %} marks what to train on; here only the body counts."""

    tags = {"generation"}  # noqa: RUF012 - declared by Jinja

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[LoopControlExtension, _GenerationBlocks]
    )
    environment.filters["tojson"] = _tojson
    return environment
