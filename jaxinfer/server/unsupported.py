"""Request fields whose feature does not exist here: a neutral value is accepted, any other is
refused by name.

Never ignored in silence: an answer that looks right but was made without the feature is worse than
a 400.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxinfer.errors import InvalidRequest

_ABSENT = (None, False, "", [], {})

# Field -> what means "not used".
NEUTRAL_VALUES: Mapping[str, tuple[Any, ...]] = {
    "length_penalty": (None, 1),
    "best_of": (None, 1),
    "suffix": (None, ""),
    "use_beam_search": (None, False),
    "prompt_logprobs": (None,),
    "truncate_prompt_tokens": (None,),
    "allowed_token_ids": (None, []),
    "bad_words": (None, []),
    "logits_processors": (None, []),
    "functions": (None, []),
    "function_call": (None, "none"),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "web_search_options": (None,),
    "documents": (None, []),
    "chat_template": (None,),
    "guided_decoding_backend": _ABSENT,
    "guided_whitespace_pattern": _ABSENT,
    "structural_tag": _ABSENT,
    "regex": _ABSENT,
}


def check_supported(
    fields: Mapping[str, Any], not_here: Mapping[str, tuple[Any, ...]] | None = None
) -> frozenset[str]:
    """
    Args:
        not_here: neutral values of fields that only another route knows.
    Returns: the names among `fields` that the two tables know.
    Raises: InvalidRequest for the first of them with a value that would need the feature.
    """
    table = {**NEUTRAL_VALUES, **(not_here or {})}
    named = frozenset(fields) & table.keys()
    for name in sorted(named):
        neutral = table[name]
        if not any(_same(fields[name], value) for value in neutral):
            raise InvalidRequest(
                f"{name} is not supported by this server; leave it out"
                + (f" or send {_shown(neutral)}" if len(neutral) > 1 else ""),
                param=name,
            )
    return named


def _same(value: Any, neutral: Any) -> bool:
    """0 equals 0.0, but False does not equal 0."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


def _shown(neutral: tuple[Any, ...]) -> str:
    return repr(neutral[1]) if neutral[1] is not False else "false"
