"""Which version of the weights a call asks for, and by what it is told from other calls.

No engine. A key of the API is never such a thing: all users of one would change versions at once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
from starlette.datastructures import Headers

from jaxinfer.errors import InvalidRequest
from jaxinfer.server.protocol import ChatRequest, CompletionRequest
from jaxinfer.server.served_versions import VERSION_HEADER

if TYPE_CHECKING:
    from jaxinfer.server.served_model import ServedModel
    from jaxinfer.server.served_versions import ServedVersions

CONVERSATION_HEADER = "x-jaxinfer-conversation"
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class VersionWish:
    """Of one call."""

    name: str | None  # of the model, without a version
    pinned: str | None  # None: any version
    param: str = VERSION_HEADER  # where it is pinned

    @classmethod
    def read(cls, headers: Headers, model: str | None, names: Collection[str]) -> VersionWish:
        """
        Args:
            model: the body's field: a name, or <name>@<version>.
            names: of the served model.
        Raises: InvalidRequest if header and body name different versions.
        """
        header = headers.get(VERSION_HEADER) or None
        name, at, version = (model or "").rpartition("@")
        if not at or model in names or name not in names:
            return cls(model, header)
        if header not in (None, version):
            raise InvalidRequest(
                f"model names the version {version[:80]!r} and the header {VERSION_HEADER} "
                f"{header[:80]!r}; send one of them",
                param="model",
            )
        return cls(name, version, "model")

    def choose(self, versions: ServedVersions, key: str = "") -> ServedModel:
        """As ServedVersions.choose. A call without a key gets the stable one.

        Raises: InvalidRequest for a version that is not there.
        """
        if self.pinned is None and not key and versions.stable is not None:
            return versions.stable
        return versions.choose(key, self.pinned, param=self.param)


def key_of(fields: ChatRequest | CompletionRequest, conversation: str | None) -> str:
    """What stays the same from call to call of one user or conversation.

    Args:
        conversation: the header CONVERSATION_HEADER.
    """
    for given in (fields.user, fields.prompt_cache_key, conversation):
        if given:
            return str(given)
    begin = _beginning(fields.messages) if isinstance(fields, ChatRequest) else fields.prompt
    return hashlib.blake2b(_encode(begin), digest_size=16).hexdigest()


def _beginning(messages: list[dict[str, object]]) -> list[dict[str, object]]:
    """Up to the first message of the user: it stays when a conversation goes on."""
    roles = [message.get("role") for message in messages]
    return messages[: roles.index("user") + 1] if "user" in roles else messages
