"""The MLflow model registry, reduced to what promotion needs. Importing this imports no MLflow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from configs.credentials import without_credentials
from tasks.mlflow_client import connect, shown_cause
from tasks.registry_errors import RegistryError, TrackingUnavailable

if TYPE_CHECKING:
    from mlflow import MlflowClient

CHAMPION = "champion"
CHALLENGER = "challenger"
PREVIOUS = "previous"
_PAGE = 200


@dataclass(frozen=True)
class Version:
    """A model version: number (string), the LoggedModel behind it, its run, when (ms since 1970) and its tags."""

    number: str
    source: str
    run_id: str | None
    created_ms: int
    tags: Mapping[str, str]

    @property
    def model_id(self) -> str | None:
        """Identifier of the LoggedModel, or None for a version that was registered another way."""
        name = self.source.removeprefix("models:/")
        return name if self.source.startswith("models:/m-") else None


class ModelRegistry:
    """One registered model. Connection troubles become TrackingUnavailable, refusals RegistryError."""

    def __init__(self, name: str, tracking_uri: str) -> None:
        self.name = name
        self.tracking_uri = tracking_uri
        self._client: MlflowClient | None = None

    @property
    def client(self) -> MlflowClient:
        """The MLflow client, made on first use."""
        if self._client is None:
            self._client = connect(self.tracking_uri)
        return self._client

    def ensure(self) -> None:
        """Make the registered model unless it exists."""
        try:
            with answering(self.tracking_uri):
                self.client.create_registered_model(self.name)
        except RegistryError as error:
            if "RESOURCE_ALREADY_EXISTS" not in error.message:
                raise

    def alias(self, alias: str) -> str | None:
        """The version that `alias` names now, read from the server (search results carry no aliases), or None."""
        try:
            with answering(self.tracking_uri):
                return str(self.client.get_model_version_by_alias(self.name, alias).version)
        except RegistryError as error:
            if "RESOURCE_DOES_NOT_EXIST" in error.message or f"alias {alias} not found" in error.message:
                return None
            raise

    def set_alias(self, alias: str, version: str) -> None:
        """Point `alias` to `version`."""
        with answering(self.tracking_uri):
            self.client.set_registered_model_alias(self.name, alias, version)

    def delete_alias(self, alias: str) -> None:
        """Remove `alias`; nothing happens when there is none."""
        if self.alias(alias) is not None:
            with answering(self.tracking_uri):
                self.client.delete_registered_model_alias(self.name, alias)

    def put_alias(self, alias: str, version: str | None) -> None:
        """Make `alias` name `version`, or nothing."""
        if version is None:
            self.delete_alias(alias)
        elif self.alias(alias) != version:
            self.set_alias(alias, version)

    def version(self, number: str) -> Version:
        """One version. Raises RegistryError when there is none."""
        with answering(self.tracking_uri):
            return _version(self.client.get_model_version(self.name, number))

    def versions(self, tags: Mapping[str, str] | None = None) -> list[Version]:
        """All versions that carry all of `tags`, oldest first."""
        conditions = [f"name='{self.name}'", *(f"tags.`{key}`='{value}'" for key, value in (tags or {}).items())]
        found: list[Version] = []
        token: str | None = None
        while True:
            with answering(self.tracking_uri):
                page = self.client.search_model_versions(" and ".join(conditions), max_results=_PAGE, page_token=token)
            found += [_version(item) for item in page]
            token = page.token
            if not token:
                return sorted(found, key=lambda item: int(item.number))

    def aliased(self) -> dict[str, str]:
        """Every alias, also those of other people, and its version."""
        with answering(self.tracking_uri):
            aliases = self.client.get_registered_model(self.name).aliases
        return {str(alias): str(version) for alias, version in aliases.items()}

    def tag(self, number: str, tags: Mapping[str, str]) -> None:
        """Set tags on a version."""
        for key, value in tags.items():
            with answering(self.tracking_uri):
                self.client.set_model_version_tag(self.name, number, key, value)

    def description(self, number: str) -> str:
        """What a version's page shows on top; empty where nothing was set."""
        with answering(self.tracking_uri):
            return str(self.client.get_model_version(self.name, number).description or "")

    def describe(self, number: str, markdown: str) -> None:
        """Set what a version's page shows on top."""
        with answering(self.tracking_uri):
            self.client.update_model_version(self.name, number, markdown)

    def delete_version(self, version: Version) -> None:
        """Delete a version and mark its LoggedModel deleted. Retention alone calls this."""
        with answering(self.tracking_uri):
            self.client.delete_model_version(self.name, version.number)
            if version.model_id is not None:
                self.client.delete_logged_model(version.model_id)


@contextmanager
def answering(where: str) -> Iterator[None]:
    """Turn MLflow's exceptions into ours: no answer is TrackingUnavailable, a refusal is RegistryError."""
    import requests.exceptions
    import sqlalchemy.exc
    from mlflow.exceptions import MlflowException

    silent = (requests.exceptions.RequestException, sqlalchemy.exc.OperationalError, ConnectionError, TimeoutError)
    try:
        yield
    except silent as error:
        raise _unavailable(where, error) from shown_cause(where, error)
    except MlflowException as error:
        if _is_silence(error):
            raise _unavailable(where, error) from shown_cause(where, error)
        said = without_credentials(f"MLflow refused ({error.error_code}): {error}")
        raise RegistryError(said) from shown_cause(where, error)


def _is_silence(error: Any) -> bool:
    """MLflow wraps failed connections and broken databases into its own exception with a general code."""
    if error.error_code in ("TEMPORARILY_UNAVAILABLE", "REQUEST_LIMIT_EXCEEDED"):
        return True
    text = str(error)
    signs = ("API request to", "Connection", "Max retries", "OperationalError", "timed out", "failed with error code 5")
    return error.error_code == "INTERNAL_ERROR" and any(sign in text for sign in signs)


def _unavailable(where: str, error: Exception) -> TrackingUnavailable:
    return TrackingUnavailable(
        f"MLflow at {without_credentials(where)} does not answer ({type(error).__name__})",
        "start the server (or mend the database) and repeat the command; what was computed is kept",
    )


def _version(found: Any) -> Version:
    return Version(
        number=str(found.version),
        source=str(found.source),
        run_id=found.run_id or None,
        created_ms=int(found.creation_timestamp),
        tags=dict(found.tags),
    )
