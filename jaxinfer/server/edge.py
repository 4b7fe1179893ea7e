"""What stands between the network and the routes, as settings: who may call, and what is told.

Pure: no HTTP. A bad value is refused where it is made.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from jaxinfer.errors import ConfigError

KEY_DIGEST = "api_key_digest"
"""In scope["state"]: SHA-256 of the key that opened, in hex; absent where no key was needed."""

IS_ADMIN = "is_admin"
"""In scope["state"]: whether that key is an admin's."""

_KEY = re.compile(r"[\x21-\x7e]+")
_ORIGIN = re.compile(r"\*|https?://[a-z0-9.\-\[\]:_]+", re.IGNORECASE)
_HOST = re.compile(r"\[[0-9a-f:]+\]|[a-z0-9._-]+", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Edge:
    """Raises: ConfigError for an origin or a host that no header can ever equal."""

    admin_keys: tuple[str, ...] = ()  # open everything; without one there is no /admin/
    open_metrics: bool = False  # /metrics without a key
    cors_origins: tuple[str, ...] = ()  # such as https://chat.example.org; or *
    allowed_hosts: tuple[str, ...] = ()  # of the Host header, without a port; none: any
    log_requests: bool = True

    def __post_init__(self) -> None:
        for origin in self.cors_origins:
            if not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    "--cors-origin: expected https://HOST, http://HOST:PORT (no path, no slash at "
                    f"the end) or *; got {origin!r}"
                )
        for host in self.allowed_hosts:
            if not _HOST.fullmatch(host):
                raise ConfigError(
                    f"--allowed-host: expected a host name or address, without a port; got {host!r}"
                )


def check_key(key: str, where: str) -> None:
    """Raises: ConfigError, which does not show the key, if no client could send it."""
    if not _KEY.fullmatch(key):
        raise ConfigError(
            f"{where}: a key must be printable ASCII without spaces; one of them is not"
        )
