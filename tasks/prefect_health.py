"""Does the Prefect server that is configured answer, and does it take our credentials?"""

from __future__ import annotations

import base64
import importlib.metadata
import json
import os
import urllib.error
import urllib.request
from collections.abc import Mapping
from http.client import HTTPException

from configs.credentials import user_and_password, without_credentials
from configs.errors import NightjarError

_SECONDS = 10.0


def check_prefect(url: str, environment: Mapping[str, str] = os.environ) -> str:
    """What stands behind `url`, in a sentence. Raises NightjarError with the way out where a night could not use it.

    Asked of a path that needs the credentials: /health is answered to everyone.
    """
    shown = without_credentials(url)
    plain, login = user_and_password(url)
    headers = _basic(":".join(login)) if login is not None else credentials(environment)
    request = urllib.request.Request(f"{plain.rstrip('/')}/admin/version", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=_SECONDS) as reply:
            server = str(json.load(reply))
    except urllib.error.HTTPError as refusal:
        if refusal.code in (401, 403):
            words = "set PREFECT_API_AUTH_STRING=user:password (PREFECT_API_KEY for Prefect Cloud)"
            raise NightjarError(f"Prefect at {shown} refuses these credentials ({refusal.code})", words) from None
        words = "PREFECT_API_URL must end in /api"
        raise NightjarError(f"{shown} answers {refusal.code}: it is no Prefect API", words) from None
    except (OSError, ValueError, HTTPException) as error:
        words = "start it, correct PREFECT_API_URL, or unset it: a night then brings a server of its own"
        raise NightjarError(f"Prefect at {shown} does not answer ({error})", words) from None
    mine = importlib.metadata.version("prefect")
    return f"{shown} answers, version {server}" + ("" if server == mine else f"; this environment has {mine}")


def credentials(environment: Mapping[str, str]) -> dict[str, str]:
    """The header that Prefect's own client would send."""
    if key := environment.get("PREFECT_API_KEY"):
        return {"Authorization": f"Bearer {key}"}
    if words := environment.get("PREFECT_API_AUTH_STRING"):
        return _basic(words)
    return {}


def _basic(words: str) -> dict[str, str]:
    return {"Authorization": f"Basic {base64.b64encode(words.encode()).decode()}"}
