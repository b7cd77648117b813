"""Which variables of an environment look like secrets: they are no business of an engine. Pure.

A user's systemd hands its own environment to every unit, with whatever a login or a session has exported: keys of
cloud services, tokens of model hubs. An engine needs none of them, for it downloads nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

# Whole words of a name, as in HF_TOKEN, OPENAI_API_KEY, DB_PASSWORD2, awsSecretAccessKey in capitals.
_SECRET = re.compile(
    r"(^|_)(API_?KEYS?|APIKEY|ACCESS_KEY|PRIVATE_KEY|SIGNING_KEY|ENCRYPTION_KEY|MASTER_KEY|TOKENS?|SECRETS?|PASSWORDS?"
    r"|PASSWD|PASSPHRASE|PASS|PWD_FILE|CREDENTIALS?|COOKIES?)\d*(_|$)",
    re.IGNORECASE,
)


def is_confidential(name: str) -> bool:
    """Whether the name of a variable says that its value is a secret."""
    return _SECRET.search(name) is not None


def confidential(names: Iterable[str]) -> frozenset[str]:
    """Those names that say that their values are secrets."""
    return frozenset(filter(is_confidential, names))
