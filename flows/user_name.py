"""Who sits at the command line, for the record of what a person decides."""

from __future__ import annotations

import getpass


def user_name() -> str:
    """The login name; a container's user need not have one."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "unknown user"
