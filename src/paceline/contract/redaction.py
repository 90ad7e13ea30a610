"""Secrets in text that others may read: access tokens, passwords in URLs, values of names like password."""

from __future__ import annotations

import re
from collections.abc import Sequence

HIDDEN = "[redacted]"

_SECRET_NAME = (
    r"(?:[\w.-]*(?:token(?!i[sz]e)|key|secret|passw|passphrase|pwd|credential|authorization|signature)[\w.-]*"
    r"|(?<![\w.-])(?:[\w.-]*[._-])?(?:sig|auth|pat))"
)
_TOKENS = re.compile(
    r"hf_\w{8,}|sk-[\w-]{16,}|gh[a-z]_\w{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}|xox[a-z]-[\w-]{10,}"
    r"|(?:AKIA|ASIA)[A-Z0-9]{16}|eyJ[\w-]+\.[\w-]+\.[\w-]+"
    r"|(?<![A-Za-z0-9])(?:npm_\w{16,}|pypi-\w{16}[\w-]*|dapi[0-9a-f]{16,}|AIza[\w-]{16,}|[prs]k_(?:live|test)_\w{8,})"
)
_URL_USER = re.compile(r"([A-Za-z][\w+.-]*://)[^\s/]*@")
_URL_VALUE = re.compile(rf"(?i)(://[^\s?]*\?(?:[^\s]*?&)?{_SECRET_NAME}=)([^\s\"'&#]+)")
_AUTHORIZATION = re.compile(r"(?i)\b(authorization[\"']?\s*[:=]\s*|bearer\s+)[^\"'\n]+")
_ASSIGNED = re.compile(rf"(?i)({_SECRET_NAME}[\"']?\s*[:=]\s*)(\"[^\"]*\"|'[^']*'|[^\s\"',;&}}]+)(?: -> .*)?")


def without_credentials(text: str) -> str:
    """``text`` without what is a secret whatever stands around it: access tokens, and passwords and keys in URLs."""
    text = _URL_USER.sub(rf"\1{HIDDEN}@", text)
    text = _URL_VALUE.sub(rf"\1{HIDDEN}", text)
    return _TOKENS.sub(HIDDEN, text)


def redacted(text: str) -> str:
    """``text`` without access tokens, passwords in URLs, and values of names like token, key, secret or password.

    For settings and arguments; prose and recipes have harmless keys and tokens, see ``without_credentials``.
    """
    text = _AUTHORIZATION.sub(rf"\1{HIDDEN}", text)
    text = _URL_USER.sub(rf"\1{HIDDEN}@", text)
    text = _ASSIGNED.sub(rf"\1{HIDDEN}", text)
    return _TOKENS.sub(HIDDEN, text)


def redacted_command(command: Sequence[str]) -> list[str]:
    """A command line, each argument ``redacted``; ``--token VALUE`` and ``token=any text`` lose the whole value."""
    shown: list[str] = []
    value_is_secret = False
    for argument in command:
        name, equals, _ = argument.partition("=")
        is_secret = re.fullmatch(_SECRET_NAME, name, re.IGNORECASE) is not None
        if value_is_secret and not argument.startswith("--"):
            shown.append(HIDDEN)
        elif is_secret and equals:
            shown.append(f"{name}={HIDDEN}")
        else:
            shown.append(redacted(argument))
        value_is_secret = is_secret and not equals and argument.startswith("-")
    return shown
