"""Text <-> token ids, and chat messages -> token ids.

Host only: no JAX here, and no files; whoever builds a Tokenizer has read them. Safe to call from
several threads. Two rules hold everywhere: we never add a second BOS, and in a chat only the
template writes control tokens, whatever the messages spell.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import tokenizers

from checkpoints.checkpoint import Checkpoint
from jaxinfer.chat_template import ChatTemplate, MarkedText
from jaxinfer.control_tokens import ControlTexts, PlainTextEncoder, encode_ids
from jaxinfer.errors import ConfigError, InvalidRequest
from jaxinfer.token_bytes import TokenBytes, WholeTexts


class Tokenizer:
    """A checkpoint's tokenizer with its chat template and its special tokens.

    Args:
        backend: taken over; its truncation and padding are switched off.
        chat_template: Jinja text, or None if the checkpoint has none.
        bos_token, eos_token: their texts, or None.
        add_bos: whether plain text begins with BOS; None: if the backend's post-processor adds it.
        eos_token_ids: the ids that end an answer.
    Raises: ConfigError if a token is not in the vocabulary, or for a template or decoder that
        cannot work.
    """

    @classmethod
    def of(cls, checkpoint: Checkpoint, chat_template: str | None = None) -> Tokenizer:
        """The checkpoint's own, with another chat template if one is given. Raises: ConfigError."""
        return cls(
            checkpoint.tokenizer,
            chat_template=chat_template or checkpoint.chat_template,
            bos_token=checkpoint.bos_token,
            eos_token=checkpoint.eos_token,
            add_bos=checkpoint.add_bos,
            eos_token_ids=checkpoint.eos_token_ids,
        )

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        chat_template: str | None,
        bos_token: str | None,
        eos_token: str | None,
        add_bos: bool | None,
        eos_token_ids: Sequence[int],
    ):
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._vocab_size = 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
        self._bos_id = _token_id(backend, "bos_token", bos_token)
        eos_id = _token_id(backend, "eos_token", eos_token)
        self._adds_bos = self._has_bos_rule() if add_bos is None else add_bos
        if self._adds_bos and self._bos_id is None:
            raise ConfigError("add_bos is set, but the tokenizer names no bos_token")
        self._eos_ids = frozenset(map(int, eos_token_ids))
        if not all(0 <= i < self._vocab_size for i in self._eos_ids):
            raise ConfigError(
                f"eos_token_ids must be in [0, {self._vocab_size}); got {sorted(self._eos_ids)}"
            )
        _make_special(backend, [i for i in (self._bos_id, eos_id) if i is not None], self._eos_ids)
        added = backend.get_added_tokens_decoder()
        self._special = {i: token for i, token in added.items() if token.special}
        self._special_ids = frozenset(self._special)
        self._spelled = TokenBytes(backend, self._vocab_size)
        self.whole_texts = WholeTexts(self._spelled, self._special_ids)
        texts = [token.content for token in self._special.values()]
        self._control = ControlTexts(texts)
        self._control_id_of = {token.content: i for i, token in self._special.items()}
        self._template = None
        if chat_template is not None:
            self._template = ChatTemplate(
                chat_template, bos_token=bos_token, eos_token=eos_token, control_texts=texts
            )

    @property
    def vocab_size(self) -> int:
        """Every id of the tokenizer is below it. The model's vocabulary may be padded to more."""
        return self._vocab_size

    @cached_property
    def hash(self) -> str:
        """SHA-256 over the texts of all ids, hex: equal ids mean equal tokens where it is equal."""
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        by_id = sorted((i, token) for token, i in vocabulary.items())
        return hashlib.sha256(json.dumps(by_id).encode()).hexdigest()

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return self._eos_ids

    @property
    def bos_token_id(self) -> int | None:
        return self._bos_id

    @property
    def adds_bos(self) -> bool:
        """Whether a plain text begins with BOS."""
        return self._adds_bos

    @property
    def special_token_ids(self) -> frozenset[int]:
        """What skip_special_tokens skips."""
        return self._special_ids

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    @property
    def chat_template(self) -> ChatTemplate | None:
        return self._template

    def control_ids(self, texts: Iterable[str]) -> dict[str, int]:
        """The ids of those of `texts` that are control tokens."""
        return {text: self._control_id_of[text] for text in texts if text in self._control_id_of}

    def encode(
        self, text: str, *, add_special_tokens: bool = True, allow_special: bool = True
    ) -> list[int]:
        """The ids of `text`.

        Args:
            add_special_tokens: begin with BOS if the model wants it; never with a second one.
            allow_special: texts such as "<|im_end|>" become their control token; False: plain text.
        Raises: InvalidRequest if `text` is no valid Unicode.
        """
        _check_unicode(text)
        ids = encode_ids(self._backend, text) if allow_special else self._plain.encode([text])
        if add_special_tokens and self._adds_bos and self._bos_id is not None:
            return ids if ids[:1] == [self._bos_id] else [self._bos_id, *ids]
        return ids

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **template_kwargs: Any,
    ) -> list[int]:
        """The prompt of a conversation, exactly as the template writes it, BOS included.

        Control tokens come from the template alone; a message that spells one is plain text.

        Args:
            messages: OpenAI's: role, content (a str or a list of text parts), tool_calls, …
            continue_final_message: end the prompt inside the last message; excludes
                add_generation_prompt.
            template_kwargs: further names for the template (RESERVED_NAMES are refused).
        Raises: InvalidRequest without a template, for malformed messages, or with the template's
            own words if it refuses them.
        """
        if self._template is None:
            raise InvalidRequest(
                "this model has no chat template; send a plain prompt (/v1/completions, generate), "
                "or give a template with --chat-template FILE",
                param="messages",
            )
        prompt = self._template.render_marked(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **template_kwargs,
        )
        return self._encode_marked(prompt)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `ids`; ids past the vocabulary have none, invalid UTF-8 reads as U+FFFD.

        Raises: InvalidRequest for a negative id.
        """
        parts: list[bytes] = []
        for token_id in ids:
            if skip_special_tokens and token_id in self._special_ids:
                continue
            part = self.spelled(token_id, is_first=not parts)
            if part is not None:
                parts.append(part)
        return b"".join(parts).decode("utf-8", "replace")

    def spelled(self, token_id: int, *, is_first: bool = False) -> bytes | None:
        """What the token adds to the text behind others (or, `is_first`, at its very start).

        None: no such token, in a hole of the vocabulary or past its end.
        Raises: InvalidRequest for a negative id.
        """
        if token_id < 0:
            raise InvalidRequest(f"a token id must be at least 0; got {token_id}")
        return self._spelled(token_id, is_first=is_first)

    def token_bytes(self, token_id: int) -> bytes:
        """The token's own bytes, also of half a character; b"" if there is no such token."""
        return self.spelled(token_id) or b""

    def token_text(self, token_id: int) -> str:
        """`token_bytes` as text; part of a character reads as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    @cached_property
    def _plain(self) -> PlainTextEncoder:
        """Copying a large vocabulary takes up to seconds and is rarely needed: on first use."""
        return PlainTextEncoder(self._backend, self._special)

    def _encode_marked(self, prompt: MarkedText) -> list[int]:
        parts: list[str | int] = []
        for n, part in enumerate(self._control.split(prompt.text)):
            is_control = n % 2
            parts.append(self._control_id_of[part] if is_control else prompt.unmarked(part))
        plain = prompt.unmarked(prompt.text)
        _check_unicode(plain)
        if not prompt.is_marked:
            ids = encode_ids(self._backend, plain)
            # A normalizer may have made a control token of what did not spell one.
            if self._control_ids(ids) == self._control_ids(parts):
                return ids
        return self._plain.encode(parts)

    def _control_ids(self, ids: Sequence[str | int]) -> list[str | int]:
        return [i for i in ids if i in self._special_ids and i != self._unknown_id]

    @cached_property
    def _unknown_id(self) -> int | None:
        unknown = getattr(self._backend.model, "unk_token", None)
        return None if unknown is None else self._backend.token_to_id(unknown)

    def _has_bos_rule(self) -> bool:
        with_rule = self._backend.encode("a", add_special_tokens=True).ids
        return self._bos_id is not None and with_rule[:1] == [self._bos_id]


def _token_id(backend: tokenizers.Tokenizer, name: str, token: str | None) -> int | None:
    token_id = None if token is None else backend.token_to_id(token)
    if token is not None and token_id is None:
        raise ConfigError(f"{name} {token!r:.100} is not in the tokenizer's vocabulary")
    return token_id


def _make_special(
    backend: tokenizers.Tokenizer, named: Iterable[int], ending: frozenset[int]
) -> None:
    """BOS, EOS and added tokens that end an answer are control tokens, whatever the file says."""
    added = backend.get_added_tokens_decoder()
    for token_id in {*named, *(ending & added.keys())}:
        known = added.get(token_id)
        if known is None or not known.special:
            text = known.content if known else backend.id_to_token(token_id)
            lstrip, rstrip = (known.lstrip, known.rstrip) if known else (False, False)
            backend.add_special_tokens(
                [tokenizers.AddedToken(text, lstrip=lstrip, rstrip=rstrip, normalized=False)]
            )


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"the text holds half of a surrogate pair (U+{ord(text[error.start]):04X}) at "
            f"character {error.start}; send valid Unicode"
        ) from error
