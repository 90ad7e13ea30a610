"""Shapes of secrets: access tokens by the marks that their issuers give them, and words that nobody would think of."""

from __future__ import annotations

import re
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
