"""Asking a running server under /admin/, with the standard library.

It follows no redirect and uses no proxy: the admin key goes to the server that was named.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, urlsplit

from jaxinfer.errors import ConfigError, JaxInferError

VERSIONS = "/admin/versions"
MAX_REPLY_BYTES = 16 * 2**20
PATIENCE_S = 60.0  # for an answer; the server lets nobody wait for more than a few seconds


class NoAnswer(JaxInferError):
    """Nobody is there, or it is not a jaxinfer server."""


class Refused(JaxInferError):
    """The server says no, and why."""


class AdminClient:
    """One server.

    Args:
        url: http://HOST:PORT, perhaps with the path that a proxy strips.
        key: an admin key; None sends none.
    Raises: ConfigError for a URL that is none.
    """

    def __init__(self, url: str, key: str | None):
        self.url = url.rstrip("/")
        self._place = urlsplit(self.url)
        if self._place.scheme not in ("http", "https") or not _has_good_host(url):
            raise ConfigError(f"--url: expected http://HOST:PORT or https://HOST; got {url!r}")
        self._headers = {"accept": "application/json", "connection": "close"}
        if key is not None:
            self._headers["authorization"] = f"Bearer {key}"

    def versions(self) -> dict[str, Any]:
        """The report, as every answer is."""
        return self._ask("GET", VERSIONS)

    def load(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Begins; `fields` are the body's."""
        return self._ask("POST", VERSIONS, fields)

    def act(self, version: str, action: str) -> dict[str, Any]:
        """`action`: promote or rollback."""
        return self._ask("POST", f"{_path_of(version)}/{action}")

    def reload(self, version: str, *, within_s: float | None) -> dict[str, Any]:
        """None: the server says within which time."""
        fields = {} if within_s is None else {"within_s": within_s}
        return self._ask("POST", f"{_path_of(version)}/reload", fields)

    def drop(self, version: str) -> dict[str, Any]:
        return self._ask("DELETE", _path_of(version))

    def _ask(
        self, method: str, path: str, fields: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Raises: NoAnswer, Refused."""
        body = None if fields is None else json.dumps(fields)
        connection = self._connect()
        try:
            connection.request(method, self._place.path + path, body, self._headers)
            reply = connection.getresponse()
            status, content = reply.status, reply.read(MAX_REPLY_BYTES)
        except TimeoutError:
            raise NoAnswer(f"{self.url} has not answered within {PATIENCE_S:g} s") from None
        except (OSError, http.client.HTTPException) as error:
            raise NoAnswer(
                f"no answer from {self.url}: {error or type(error).__name__}; is the server "
                "running, and is --url its address?"
            ) from None
        finally:
            connection.close()
        return self._read(status, content)

    def _connect(self) -> http.client.HTTPConnection:
        kinds = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}
        kind = kinds[self._place.scheme]
        assert self._place.hostname is not None
        return kind(self._place.hostname, self._place.port, timeout=PATIENCE_S)

    def _read(self, status: int, content: bytes) -> dict[str, Any]:
        try:
            found = json.loads(content)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise NoAnswer(f"{self.url} answered {status} and no JSON; is that a jaxinfer server?")
        if status >= 300:
            raise Refused(_reason(status, found))
        return found


def _path_of(version: str) -> str:
    return f"{VERSIONS}/{quote(version, safe='')}"


def _has_good_host(url: str) -> bool:
    place = urlsplit(url)
    try:
        return bool(place.hostname) and (place.port is None or place.port > 0)
    except ValueError:  # a port that is no number
        return False


def _reason(status: int, body: dict[str, Any]) -> str:
    error = body.get("error")
    message = error.get("message") if isinstance(error, dict) else None
    text = f"{message or 'it says no more'} ({status})"
    if status in (401, 403):
        text += "; --admin-key-file, --admin-key or JAXINFER_ADMIN_KEY gives it"
    return text
