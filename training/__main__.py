"""`python -m training STAGE DIRECTORY`: run one stage by its spec.json. Works by hand, with no server."""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import sys
from pathlib import Path

from training.disk import full_disk_in_words
from training.errors import NightjarError
from training.process import die_with_parent, run_stage, watch_lease

STAGES = {
    "base": "training.base",
    "sft": "training.sft",
    "reward": "training.reward",
    "distill": "training.distill",
    "annotate": "training.annotate",
    "ppo": "training.ppo.stage",
    "evaluate": "training.evaluation.evaluate",
}


def main(arguments: list[str] | None = None) -> int:
    """Parse, run, and say errors in words. Exit code 2: the user can fix it; anything else is a crash."""
    parser = argparse.ArgumentParser(prog="python -m training", description=__doc__)
    parser.add_argument("stage", choices=sorted(STAGES))
    parser.add_argument("directory", type=Path, help="stage directory holding spec.json")
    parser.add_argument("--ready", action="store_true", help="load everything, then wait for a line on standard input")
    options = parser.parse_args(arguments)
    die_with_parent()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stdout)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from training.runtime import prepare_torch  # torch is imported only once the arguments are right

    if options.ready:
        importlib.import_module(STAGES[options.stage])
        if not sys.stdin.readline():
            return 0  # whoever was to say when is gone, or does not need this stage
    watch_lease(options.directory)
    try:
        with full_disk_in_words(options.directory):
            prepare_torch(options.directory)
            run_stage(options.directory, importlib.import_module(STAGES[options.stage]).run)
    except NightjarError as error:
        logging.getLogger("nightjar").error("%s: %s", type(error).__name__, error)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
