"""The classes that exist, and which of them a request belongs to.

Pure. A request is of the class that its body's `priority` names, else of the one of its header
`x-jaxinfer-priority`, else of its API key's, else of the default class. The class of a key is also
its ceiling: asking for a better one is Forbidden (403, not 400: the same request is right with
another key; clients do not repeat it). A key without a class has no ceiling.

An integer, as vLLM's clients send it, means the best class that is not better than it: with -1, 0
and 1, everything below -1 is -1, everything above 1 is 1. So nobody gets past the best class.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from jaxinfer.errors import ConfigError, Forbidden, InvalidRequest
from jaxinfer.server.priority_class import DEFAULT_CLASS, DEFAULT_CLASSES, PriorityClass

PRIORITY_HEADER = "x-jaxinfer-priority"
MAX_CLASSES = 16
_GOOD_NAME = re.compile(r"[A-Za-z0-9_-]{1,40}")  # a header's value and a metric's label


@dataclass(frozen=True)
class PriorityClasses:
    """All classes of a server.

    Raises: ConfigError for a bad or double name, two classes of one priority, a key of two classes,
        or a default that does not exist.
    """

    classes: tuple[PriorityClass, ...] = DEFAULT_CLASSES
    default_name: str = DEFAULT_CLASS
    _by_digest: Mapping[bytes, PriorityClass] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        ordered = tuple(sorted(self.classes, key=lambda c: c.priority))
        object.__setattr__(self, "classes", ordered)  # the best first
        if not 1 <= len(ordered) <= MAX_CLASSES:
            raise ConfigError(
                f"there must be 1 to {MAX_CLASSES} priority classes; got {len(ordered)}"
            )
        for found in ordered:
            if not _GOOD_NAME.fullmatch(found.name):
                raise ConfigError(
                    "a priority class's name must be 1 to 40 letters, digits, _ or -; "
                    f"got {found.name!r}"
                )
        self._check_pairs()
        if self.default_name not in self.names:
            raise ConfigError(
                f"the default class must be one of {', '.join(self.names)}; "
                f"got {self.default_name!r}"
            )
        by_digest = {_digest(key.encode()): c for c in ordered for key in c.api_keys}
        object.__setattr__(self, "_by_digest", by_digest)

    def _check_pairs(self) -> None:
        for number, one in enumerate(self.classes):
            for other in self.classes[number + 1 :]:
                if one.name == other.name:
                    raise ConfigError(f"priority class {one.name!r} is there twice")
                if one.priority == other.priority:
                    raise ConfigError(
                        f"priority classes {one.name!r} and {other.name!r} both have priority "
                        f"{one.priority}; give each its own"
                    )
                if not set(one.api_keys).isdisjoint(other.api_keys):
                    raise ConfigError(
                        f"priority classes {one.name!r} and {other.name!r} share an API key; "
                        "give it to one of them"
                    )

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(c.name for c in self.classes)

    @property
    def default(self) -> PriorityClass:
        return next(c for c in self.classes if c.name == self.default_name)

    @property
    def api_keys(self) -> tuple[str, ...]:
        """Of all classes; they open the server as --api-key does."""
        return tuple(key for c in self.classes for key in c.api_keys)

    def of_key(self, authorization: str) -> PriorityClass | None:
        """The class of the API key in an Authorization header that has been checked."""
        if not self._by_digest:
            return None
        key = authorization.partition(" ")[2].strip()
        return self._by_digest.get(_digest(key.encode("latin-1")))

    def find(self, wanted: str | int, param: str) -> PriorityClass:
        """The class of a name or an integer.

        Raises: InvalidRequest naming `param` and the classes that exist.
        """
        if isinstance(wanted, int):
            return next((c for c in self.classes if c.priority >= wanted), self.classes[-1])
        for found in self.classes:
            if found.name == wanted:
                return found
        raise InvalidRequest(
            f"{param} must be one of {', '.join(self.names)}; got {wanted[:80]!r}", param=param
        )


@dataclass(frozen=True, slots=True)
class Claim:
    """What a request's headers say about its class, before its body has come."""

    classes: PriorityClasses
    of_header: PriorityClass | None
    of_key: PriorityClass | None

    @classmethod
    def read(cls, classes: PriorityClasses, *, priority: str | None, authorization: str) -> Claim:
        """Raises: InvalidRequest for a class that does not exist; Forbidden above the key's."""
        claim = cls(classes, None, classes.of_key(authorization))
        if priority is None:
            return claim
        found = claim.allowed(classes.find(priority, PRIORITY_HEADER), PRIORITY_HEADER)
        return cls(classes, found, claim.of_key)

    @property
    def presumed(self) -> PriorityClass:
        """The class, if the body names no other."""
        return self.of_header or self.of_key or self.classes.default

    @property
    def best(self) -> PriorityClass:
        """The best class that the body may yet ask for; one that the header names is believed."""
        return self.of_header or self.of_key or self.classes.classes[0]

    def settled(self, of_body: str | int | None) -> PriorityClass:
        """The class. Raises: InvalidRequest, Forbidden."""
        if of_body is None:
            return self.presumed
        return self.allowed(self.classes.find(of_body, "priority"), "priority")

    def allowed(self, wanted: PriorityClass, param: str) -> PriorityClass:
        """`wanted`, unless it is better than the key's class. Raises: Forbidden."""
        ceiling = self.of_key
        if ceiling is not None and wanted.priority < ceiling.priority:
            raise Forbidden(
                f"this API key is of class {ceiling.name!r} and may not ask for {wanted.name!r}; "
                f"leave {param} out or use another key",
                param=param,
            )
        return wanted


def _digest(key: bytes) -> bytes:
    """Keys are looked up by digest, so that no time tells how much of one was right."""
    return hashlib.sha256(key).digest()
