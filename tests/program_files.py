"""Files of compiled programs, taken apart and put together: damaged, or well made and wrong."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from jaxinfer.runtime.program_cache import DIGEST_BYTES, LENGTH_BYTES, MAGIC

START = len(MAGIC) + DIGEST_BYTES


def remade(content: bytes, **changes: Any) -> bytes:
    """The same program under a head with changes, and the digest of that."""
    head, body = _parts(content)
    changed = json.dumps(json.loads(head) | changes).encode()
    return _sealed(changed, body)


def with_head(head: bytes) -> bytes:
    """No program behind any head, and the digest of that."""
    return _sealed(head, b"")


def with_body(content: bytes, body: bytes) -> bytes:
    """The same head and another body, and the digest of that."""
    return _sealed(_parts(content)[0], body)


def _parts(content: bytes) -> tuple[bytes, bytes]:
    start = START + LENGTH_BYTES
    end = start + int.from_bytes(content[START:start], "big")
    return content[start:end], content[end:]


def _sealed(head: bytes, body: bytes) -> bytes:
    rest = len(head).to_bytes(LENGTH_BYTES, "big") + head + body
    return MAGIC + hashlib.sha256(rest).digest() + rest
