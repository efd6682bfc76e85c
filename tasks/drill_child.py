"""A promotion that is killed, for the drill: `python -m tasks.drill_child HOME CONFIG CANDIDATE JUDGED_AGAINST`.

SIGKILL comes when the alias has moved and the journal does not say `verified` yet: the worst moment there is.
"""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

from configs.schema.registry import RegistryConfig
from tasks.promotion import promote
from tasks.registry import CHAMPION, ModelRegistry
from tasks.site import Site


class _Fatal(ModelRegistry):
    def set_alias(self, alias: str, version: str) -> None:
        super().set_alias(alias, version)
        if alias == CHAMPION:
            os.kill(os.getpid(), signal.SIGKILL)


def main(home: str, config: str, candidate: str, judged_against: str) -> None:
    """Promote `candidate` for real, and die of it."""
    site = Site.open(Path(home), RegistryConfig.model_validate_json(config))
    fatal = replace(site, registry=_Fatal(site.model, site.tracking_uri))
    promote(fatal, candidate, judged_against=judged_against)


if __name__ == "__main__":
    main(*sys.argv[1:])
