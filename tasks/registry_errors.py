"""What can go wrong between Nightjar and the registry. Each says who can mend it and whether the champion stands."""

from __future__ import annotations

from configs.errors import NightjarError

__all__ = [
    "BannedVersion",
    "JournalContradicted",
    "JournalError",
    "LockHeld",
    "LockUnusable",
    "NoChampionYet",
    "PromotionError",
    "PromotionRaced",
    "RegistryError",
    "RollbackRefused",
    "ServingError",
    "StoredBytesDiffer",
    "TrackingUnavailable",
]


class TrackingUnavailable(NightjarError, ConnectionError):
    """The MLflow store does not answer. Nothing is lost: what was to be sent stays on disk and is sent later."""


class RegistryError(NightjarError, RuntimeError):
    """The registry answered, and refused; the message is its own. The champion stays."""


class JournalError(NightjarError, RuntimeError):
    """The journal holds a line that is neither record nor sealed fragment; a person must look before anything moves."""


class JournalContradicted(NightjarError, RuntimeError):
    """Journal, nights and registry contradict each other: one of them was lost. Nothing is promoted, taken down or
    deleted before a person has restored it or taken the registry as it is."""


class LockHeld(NightjarError, RuntimeError):
    """Another process is doing the same thing; try again when it has ended."""


class LockUnusable(NightjarError, RuntimeError):
    """The lock's file cannot be made or opened, so nobody can be kept out; nothing was begun."""


class NoChampionYet(NightjarError):
    """No version of this model was ever promoted: a night must do it first."""


class PromotionError(NightjarError, RuntimeError):
    """A promotion did not reach `verified`; the previous champion is back, or reconcile will put it back."""


class PromotionRaced(PromotionError):
    """Somebody else moved the alias meanwhile; theirs stands, the challenger must be judged against it first."""


class BannedVersion(PromotionError):
    """The version, or one with the same weights, was rolled back before; only a person's force promotes it again."""


class StoredBytesDiffer(PromotionError):
    """What the artifact store holds is not what was logged; the version is never promoted."""


class ServingError(PromotionError):
    """A stored version does not load, or does not answer; the message ends with the child's last words."""


class RollbackRefused(NightjarError, RuntimeError):
    """There is nothing sound to go back to; the champion stays."""
