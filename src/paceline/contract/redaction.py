"""Secrets in text that others may read: access tokens, keys, passwords in URLs, values of names like password.

Access tokens are known by the marks that their issuers give them, and words by their letters: nobody would think of
them.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from itertools import pairwise

_ISSUED = (
    r"hf_\w{8,}|api_org_\w{16,}",  # Hugging Face
    r"sk-[\w-]{16,}|r8_\w{20,}|gsk_\w{20,}|xai-\w{20,}|pplx-\w{20,}|nvapi-[\w-]{20,}|wandb_v\d_\w{16,}",  # models
    r"gh[opsur]_\w{16,}|github_pat_\w{16,}|gl(?:pat|dt|rtr?|cbt|ptt|ft|soat|agent|oas|imt|ffct)-[\w-]{16,}",  # forges
    r"AT(?:ATT|BB|CTT)[\w=-]{16,}|lin_api_\w{16,}|ntn_\w{20,}|secret_\w{32,}|pat\w{14}\.[0-9a-f]{32,}",  # trackers
    r"npm_\w{16,}|pypi-\w{16}[\w-]*|rubygems_[0-9a-f]{16,}|dckr_pat_[\w-]{16,}|AKCp\w{20,}|oy2[a-z0-9]{43}",  # packages
    r"A(?:KIA|SIA|BIA|CCA)[A-Z0-9]{16}",  # Amazon
    r"AIza[\w-]{16,}|ya29\.[\w.-]{8,}|1//0[\w-]{20,}|GOCSPX-[\w-]{16,}",  # Google
    r"\w{3}\dQ~[\w.~-]{20,}",  # Azure
    r"do[opr]_v1_[0-9a-f]{16,}|hv[bsr]\.[\w-]{16,}|\w{14}\.atlasv1\.[\w-]{20,}|pul-[0-9a-f]{20,}|sbp_[0-9a-f]{16,}"
    r"|dapi[0-9a-f]{16,}|dp\.[a-z]{2,5}\.\w{16,}|sl\.[\w-]{60,}|PMAK-[\w-]{20,}|nfp_\w{20,}",  # clouds
    r"NRAK-\w{20,}|sntry[su]_[\w+/=-]{16,}|gl(?:sa|c)_[\w+/=-]{16,}",  # monitors
    r"xox[a-z]-[\w-]{10,}|xoxe\.[\w.-]{10,}|xapp-[\w-]{10,}|\d{8,10}:AA[\w-]{30,}"
    r"|[MNO][\w-]{23,27}\.[\w-]{6,7}\.[\w-]{27,}",  # chats
    r"SG\.[\w-]{8,}\.[\w-]{8,}|key-[0-9a-f]{32}|[0-9a-f]{32}-us\d{1,2}|SK[0-9a-f]{32}",  # mail and phones
    r"[prs]k_(?:live|test)_\w{8,}|whsec_[\w+/=-]{16,}|sq0[a-z]{3}-[\w-]{16,}"
    r"|shp(?:at|ca|pa|ss)_[0-9a-fA-F]{16,}",  # shops
    r"EAA[A-Za-z0-9]{24,}|AGE-SECRET-KEY-1\w{16,}|eyJ[\w-]{6,}(?:\.[\w-]+){2,4}",
    r"[a-z]{2,12}_(?:pat|tkn|token|secret|apikey|live)_\w{16,}",
)
TOKENS = re.compile(rf"(?<![A-Za-z0-9])(?:{'|'.join(_ISSUED)})")
"""Tokens whose first characters say what they are."""

PEM = re.compile(r"-----BEGIN [A-Z0-9 ]+-----(?:.*?-----END [A-Z0-9 ]+-----|.*)", re.DOTALL)
"""Keys and certificates; one that is cut off, to the end of the text."""

_RUNS = re.compile(r"[A-Za-z0-9]{20,}")
_WORDS = re.compile(r"[A-Za-z0-9_-]{20,}")
_BASE64 = re.compile(r"(?<![\w/+-])(?:[A-Za-z0-9+/]{40}(?![\w/+=-])|[A-Za-z0-9+/]{20,}={1,2}(?!\w))")

_RANDOM = 0.45
"""Share of neighbours of different kinds (small letter, capital, digit): of random ones 0.62, of names a third."""

_RANDOM_BASE64 = 0.3
"""The same of what has the length, or the filling, of a key in base64."""

_PIECE = 12
"""Letters and digits between two hyphens: of random words about 32, of names of models and runs five."""


def hide_random(text: str, hidden: str) -> str:
    """Replace words of small letters, capitals and digits in no order, as keys are drawn.

    Hexadecimal digits stay, for a key of these looks like the digest of a commit or of data.
    """
    for pattern, least in ((_BASE64, _RANDOM_BASE64), (_WORDS, _RANDOM), (_RUNS, _RANDOM)):
        text = pattern.sub(lambda found, least=least: hidden if _is_random(found[0], least) else found[0], text)  # type: ignore[misc]
    return text


def _is_random(word: str, least: float) -> bool:
    """Whether at least so large a share of neighbours is of different kinds, and few hyphens stand between them."""
    kinds = [_kind(character) for character in word if character.isalnum()]
    if len(kinds) < 20 or len(set(kinds)) < 3 or word.startswith("/"):
        return False
    if len(kinds) < _PIECE * len(re.split(r"[_-]+", word.strip("_-"))):
        return False
    return sum(one != other for one, other in pairwise(kinds)) >= least * (len(kinds) - 1)


def _kind(character: str) -> str:
    return "digit" if character.isdigit() else "capital" if character.isupper() else "small"


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
