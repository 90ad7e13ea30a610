"""Secrets in text that others may read: access tokens, keys, passwords in URLs, values of names like password."""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence

from paceline.contract.secret_shapes import PEM, TOKENS, hide_random

HIDDEN = "[redacted]"

_STEM = (
    r"token(?!i[sz]e|s\b)|(?<!mon)(?<!tur)(?<!hoc)(?<!joc)(?<!don)(?<!whis)key(?!word|board|stone|note|frame|point)"
    r"|secret|passw|passphrase|passcode|pwd|credential|authorization|signature"
)
_WHOLE = (
    r"sig|auth|pat|pass|pw|psw|otp|sid|jwt|bearer|dsn|creds?|cookies?|session(?:[._-]?id)?|webhook(?:[._-]?url)?"
    r"|conn(?:ection)?[._-]?str(?:ing)?"
)
_SECRET = (
    r"(?![\w.-]*(?:pad|bos|eos|sep|cls|unk|mask)_token)"
    rf"(?=[\w.-]*?(?:{_STEM})|(?:[\w.-]*[._-])?(?:{_WHOLE})(?![\w.-]))[\w.-]++"
)
_SECRET_NAME = rf"(?<![\w.-]){_SECRET}"
"""Names whose values are hidden in commands and settings; looked at once, so that long words take no square of time."""

_STRONG_NAME = (
    r"(?<![\w.-])(?=(?:[\w.-]*[._-])?(?:passw(?:or)?d|passphrase|pwd|pw|(?:client[._-]?)?secret"
    r"|(?:api|access|private|secret|account|subscription|signing)[._-]?(?:access[._-]?)?key"
    r"|(?:api|access|auth|refresh|bearer|private|session|hub|hf|bot|git(?:hub|lab)?)[._-]?token)(?![\w.-]))[\w.-]++"
)
"""Names that no harmless value has, also in prose and in a model's configuration."""

_URL_USER = re.compile(
    r"(?<![\w+.-])([A-Za-z][\w+.-]*://)(?:[^\s/]*|[^\s/:@\"']*:(?!\d{1,5}/)[^\s\"'<>]*)@"  # a port is no password
)
_URL_VALUE = re.compile(rf"(?i)([?&;#]{_SECRET_NAME}=)([^\s\"'&#]+)")
_WEBHOOK = re.compile(
    r"(?i)((?:https?://)?(?<![\w.-])(?:hooks\.(?:slack(?:-gov)?|zapier)\.com|discord(?:app)?\.com/api/(?:v\d+/)?webhooks)/"
    r"|https?://(?:hooks?\.[^\s/\"']+/|[^\s\"'?#]*/(?:(?:web)?hooks?(?:b2)?|with/key)/(?=[^\s\"']*\d)))[^\s\"']{8,}"
)
_BARE_USER = re.compile(r"(?<![\w/.@:-])(?!mailto:)([\w.-]+:)[^\s:@/\"']+(?=@[\w-]+[.:]\w)")
_NOT_YET = r"(?!\\*[\"']?\[redacted)"
_HEADER = re.compile(
    r"(?i)\b((?:proxy-)?authorization|(?:set-)?cookie|x-(?:api|auth|access)[\w-]*|private-token)"
    rf"(\\*[\"']?\s*[:=]\s*+\\*+[\"']?+){_NOT_YET}[^\"'\n]+"
)
_BEARER = re.compile(r"(?i)\b(bearer\s+)(?=\S{16,}|\S*[\d._~+/=-]\S)[^\s\"',;]+")
_BASIC = re.compile(r"(?i)\b(basic\s+)([A-Za-z0-9+/]{6,}={0,2})")
_QUOTED = r"\\*\"[^\"]*\"?|\\*'[^']*'?"
_AFTER_NAME = r"\\*[\"']?\s*"
_ASSIGNED = re.compile(
    rf"(?i)({_SECRET_NAME}{_AFTER_NAME}[:=]\s*+){_NOT_YET}"
    rf"(?:{_QUOTED}|(?<=[=:])[^\s\"',;&}}]+|(?<=\s)[^\n\"',;&}}]+)(?: -> .*)?"
)
_STRONGLY_ASSIGNED = re.compile(
    rf"(?i)({_STRONG_NAME}{_AFTER_NAME}[:=]\s*+){_NOT_YET}(?!(?:none|null|true|false)\b)"
    r"(?:\\*[\"'][^\"']{3,}\\*[\"']|[^\s\"',;&}]{3,})"
)
_OPTION = re.compile(rf"(?i)(?<!\S)(-(?:u|-user|-proxy-user)\s+[^\s:]+:|--{_SECRET}\s++)(?!-){_NOT_YET}[^\s\"']+")
_USER_OPTIONS = frozenset({"-u", "--user", "--proxy-user"})


def without_credentials(text: str) -> str:
    """``text`` without what is a secret whatever stands around it.

    That is access tokens, PEM blocks, passwords and keys in URLs, webhooks, headers that log in, and values of names
    like ``password`` and ``api_key``. For prose and recipes, which have harmless keys and tokens.
    """
    text = _without_shapes(text)
    return _STRONGLY_ASSIGNED.sub(rf"\1{HIDDEN}", text)


def redacted(text: str) -> str:
    """``text`` without what ``without_credentials`` hides, values of names like token and key, and random words.

    For settings and arguments.
    """
    text = _OPTION.sub(rf"\1{HIDDEN}", _without_shapes(text))
    text = _ASSIGNED.sub(rf"\1{HIDDEN}", text)
    return hide_random(_BARE_USER.sub(rf"\1{HIDDEN}", text), HIDDEN)


def redacted_command(command: Sequence[str]) -> list[str]:
    """A command line, each argument ``redacted``; ``--token VALUE`` and ``token=any text`` lose the whole value."""
    shown: list[str] = []
    value_is_secret, before = False, ""
    for argument in command:
        name, equals, _ = argument.partition("=")
        is_secret = re.fullmatch(_SECRET_NAME, name, re.IGNORECASE) is not None
        if value_is_secret and not argument.startswith("--"):
            shown.append(HIDDEN)
        elif is_secret and equals:
            shown.append(f"{name}={HIDDEN}")
        elif before in _USER_OPTIONS and ":" in argument:
            shown.append(f"{argument.partition(':')[0]}:{HIDDEN}")
        else:
            shown.append(redacted(argument))
        value_is_secret = is_secret and not equals and argument.startswith("-")
        before = argument
    return shown


def _without_shapes(text: str) -> str:
    text = PEM.sub(HIDDEN, text)
    text = _HEADER.sub(rf"\1\2{HIDDEN}", text)
    text = _BEARER.sub(rf"\1{HIDDEN}", text)
    text = _BASIC.sub(_without_login, text)
    text = _URL_USER.sub(rf"\1{HIDDEN}@", text)
    text = _WEBHOOK.sub(rf"\1{HIDDEN}", text)
    text = _URL_VALUE.sub(rf"\1{HIDDEN}", text)
    return TOKENS.sub(HIDDEN, text)


def _without_login(found: re.Match[str]) -> str:
    """``Basic`` and what is USER:PASSWORD in base64; the word stays where something else follows."""
    encoded = found[2]
    try:
        is_login = b":" in base64.b64decode(encoded + "=" * (-len(encoded) % 4), validate=True)
    except ValueError:
        is_login = False
    return f"{found[1]}{HIDDEN}" if is_login else found[0]
