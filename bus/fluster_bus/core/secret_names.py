"""Which environment variables are likely to be secrets, by their names, and how an environment is shown without them."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

MASK = "***"
_SECRET = re.compile(r"TOKEN(?!IZ)|SECRET|KEY|PASSWORD", re.IGNORECASE)


def is_secret_name(name: str) -> bool:
    """True for names like HF_TOKEN (and not TOKENIZERS_PARALLELISM), CLIENT_SECRET, AWS_ACCESS_KEY_ID and PGPASSWORD."""
    return _SECRET.search(name) is not None


def masked(variables: Mapping[str, str], secrets: Collection[str] = ()) -> dict[str, str]:
    """The variables to be shown: the values of `secrets`, and of names that look like secrets, are replaced by `***`."""
    return {name: MASK if name in secrets or is_secret_name(name) else value for name, value in variables.items()}
