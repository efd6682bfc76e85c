"""`python -m tasks STAGE DIRECTORY`: stages that need more than training has (Great Expectations), by their spec.json.

Works by hand, with no server, as `python -m training` does.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import sys
from pathlib import Path

from training.disk import full_disk_in_words
from training.errors import NightjarError
from training.process import die_with_parent, run_stage, watch_lease

STAGES = {"validate": "tasks.validate_stage"}
USER_ERROR = 2


def main(arguments: list[str] | None = None) -> int:
    """Parse, run, and say errors in words. Exit code 2: the user can mend it; anything else is a crash."""
    parser = argparse.ArgumentParser(prog="python -m tasks", description=__doc__)
    parser.add_argument("stage", choices=sorted(STAGES))
    parser.add_argument("directory", type=Path, help="stage directory holding spec.json")
    options = parser.parse_args(arguments)
    die_with_parent()
    watch_lease(options.directory)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stdout)
    try:
        with full_disk_in_words(options.directory):
            run_stage(options.directory, importlib.import_module(STAGES[options.stage]).run)
    except NightjarError as error:
        logging.getLogger("nightjar").error("%s: %s", type(error).__name__, error)
        return USER_ERROR
    return 0


if __name__ == "__main__":
    sys.exit(main())
