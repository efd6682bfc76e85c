"""Telling people through Prefect's notification blocks, named in a deployment; naming none is fine.

A message that cannot be sent is logged and changes nothing else: what it tells of is in the registry, in the journal
and on the flow run's page all the same.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence

from configs.errors import NightjarError

log = logging.getLogger(__name__)
_NAME = re.compile(r"[a-z0-9-]+/[a-z0-9-]+")
_CREATE = "create it in Prefect under Blocks, or remove the name from `nightjar deploy --notify`"


class NotifyError(NightjarError):
    """A notification block is not there or refuses; nothing else is affected."""


def notify(blocks: Sequence[str], subject: str, body: str) -> list[str]:
    """Send `body` through every block (`slack-webhook/ops`, ...). Returns a sentence for each that did not take it.

    Never raises: a message is no reason to fail.
    """
    problems = []
    for name in blocks:
        try:
            _send(name, subject, body)
        except NotifyError as error:
            problems.append(str(error))
            log.warning("%s", error)
    return problems


def check_blocks(blocks: Sequence[str]) -> None:
    """Every named block is on the server. Raises NotifyError naming the first that is not."""
    for name in blocks:
        _load(name)


def require_block_name(name: str) -> str:
    """The name, where it has the form of one. Raises NotifyError; asks no server."""
    if not _NAME.fullmatch(name):
        raise NotifyError(
            f"{name!r} does not name a block", "write type/name, for instance slack-webhook/ops or ms-teams-webhook/ops"
        )
    return name


def _send(name: str, subject: str, body: str) -> None:
    block = _load(name)
    try:
        with block.raise_on_failure():
            block.notify(body, subject)
    except Exception as error:
        # Not the error's own words: they often hold the webhook's address, which is its password.
        raise NotifyError(
            f"notification block {name} did not take the message ({type(error).__name__})",
            "test the block on its page in Prefect",
        ) from None


def _load(name: str):  # type: ignore[no-untyped-def]  # NotificationBlock; Prefect is imported late, it takes seconds
    from prefect.blocks.abstract import NotificationBlock
    from prefect.blocks.core import Block
    from prefect.exceptions import ObjectNotFound

    require_block_name(name)
    try:
        block = Block.load(name)
    except Exception as error:
        if isinstance(error.__cause__, ObjectNotFound):
            raise NotifyError(f"this Prefect server has no block {name}", _CREATE) from None
        raise NotifyError(
            f"notification block {name} cannot be loaded ({type(error).__name__})",
            _CREATE,
        ) from None
    if not isinstance(block, NotificationBlock):
        raise NotifyError(f"block {name} is no notification block", "name a Slack, Teams, e-mail or webhook block")
    return block
