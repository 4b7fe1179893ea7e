"""The port, bound before anything is loaded."""

from __future__ import annotations

import socket

SILENT_PEER_MS = 120_000


def bind(host: str, port: int) -> socket.socket:
    """A bound TCP socket. Raises: OSError; UnicodeError for a host that is no host name."""
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            # A peer that takes no byte for so long is closed by the kernel; connections inherit it.
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENT_PEER_MS)
        listener.bind(address)
    except OSError:
        listener.close()
        raise
    return listener
