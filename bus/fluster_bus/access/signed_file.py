"""A file with a user's signed token and seed, in the form of NATS (`.creds`), which `nats --creds` and other clients take.

Before both stands a line that only Fluster reads: the servers where they are good. Behind them stand the certificates (PEM) of who
signed those of the servers, so that `nats --tlsca` takes the file as well.
"""

from __future__ import annotations

import re

from fluster_bus.access.tls import certificates_in

_SERVERS = "# fluster: "
_MARK = "BEGIN NATS USER JWT"
_PARTS = re.compile(r"^-{3,}BEGIN (NATS USER JWT|USER NKEY SEED)-{3,}\s*\n\s*([\w.=-]+)\s*\n-{3,}END", re.MULTILINE)
_NAMES = {"NATS USER JWT": "token", "USER NKEY SEED": "seed"}


def is_signed_file(data: bytes) -> bool:
    """Whether a file of credentials is one of these."""
    return _MARK.encode() in data


def signed_file_values(data: bytes) -> dict[str, str]:
    """Token and seed, the URL if there is one, and as `ca` the certificates if there are some. Raises ValueError."""
    text = data.decode("utf-8").replace("\r\n", "\n")
    values = {_NAMES[kind]: value for kind, value in _PARTS.findall(text)}
    if values.keys() != {"token", "seed"}:
        raise ValueError("no token, or no seed")
    for line in text.splitlines():
        if line.startswith(_SERVERS):
            values["url"] = line.removeprefix(_SERVERS).strip()
    if certificates := certificates_in(text):
        values["ca"] = certificates
    return values


def signed_file_text(url: str | None, token: str, seed: str, ca: str | None = None) -> str:
    """What such a file says."""
    return f"""\
{f"{_SERVERS}{url}" if url is not None else ""}
-----BEGIN NATS USER JWT-----
{token}
------END NATS USER JWT------

What follows makes its owner this user: keep the file to yourself.
-----BEGIN USER NKEY SEED-----
{seed}
------END USER NKEY SEED------
{
        f'''
By these the servers are known:
{ca}'''
        if ca is not None
        else ""
    }""".lstrip("\n")
