"""Keys, origins and hosts: what no header could equal is refused at start."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxinfer.errors import ConfigError
from jaxinfer.server.edge import Edge
from jaxinfer.server.settings import ServeSettings, parse


def settings(*argv: str) -> ServeSettings:
    return parse(argv, {})[0]


@pytest.mark.parametrize("origin", ["https://a.example", "http://localhost:3000", "*"])
def test_an_origin_has_a_scheme_and_a_host(origin: str):
    assert settings("--cors-origin", origin).edge.cors_origins == (origin,)


@pytest.mark.parametrize("origin", ["a.example", "https://a.example/", "https://a/b", "ftp://a"])
def test_what_no_origin_header_can_say_is_refused(origin: str):
    with pytest.raises(ConfigError, match="--cors-origin: expected"):
        settings("--cors-origin", origin)


@pytest.mark.parametrize("host", ["a.example:80", "https://a.example", "a b"])
def test_an_allowed_host_has_no_port_and_no_scheme(host: str):
    with pytest.raises(ConfigError, match="--allowed-host: expected"):
        settings("--allowed-host", host)
    assert Edge(allowed_hosts=("a.example", "10.0.0.1", "[::1]"))


@pytest.mark.parametrize("key", ["a b", "schlüssel", "\u200bkey", "a\tb"])
def test_a_key_that_no_client_could_send_is_refused_and_not_shown(tmp_path: Path, key: str):
    file = tmp_path / "keys"
    file.write_text(f"good\n\n{key}\n", "utf-8")
    for flag in ("--api-key", "--admin-key"):
        with pytest.raises(ConfigError, match="printable ASCII") as caught:
            settings(flag, key)
        assert key not in str(caught.value)
        with pytest.raises(ConfigError, match="keys, line 3: a key must") as caught:
            settings(f"{flag}-file", str(file))
        assert key not in str(caught.value)


def test_blanks_around_a_key_a_byte_order_mark_and_repeated_keys_do_not_count(tmp_path: Path):
    file = tmp_path / "keys"
    file.write_text("one\r\n  two \none\n", "utf-8-sig")
    found = settings("--api-key", "two, three,two", "--api-key-file", str(file))
    assert found.api_keys == ("two", "three", "one")


def test_one_key_cannot_be_of_both_kinds():
    with pytest.raises(ConfigError, match="both an API key and an admin key") as caught:
        settings("--api-key", "a,same", "--admin-key", "same")
    assert "same" not in str(caught.value)


def test_an_admin_key_file_without_a_key_is_an_error(tmp_path: Path):
    with pytest.raises(ConfigError, match="--admin-key-file"):
        settings("--admin-key-file", str(tmp_path / "missing"))
