"""Do the model folders, and what the config asks of them, go together? Before any compute, without torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from configs.errors import ConfigError, NightjarError
from configs.schema import NightConfig
from configs.schema.models import QUICKSTART_BASE
from configs.schema.supervised import SupervisedConfig
from training.contract import read_json
from training.errors import ContractError, ModelFolderError
from training.models.folder import check_model_folder, has_chat_template
from training.models.safetensors_header import read_shapes

_LLAMA_MATRICES = (
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
)
ADAPTER_FILES = ("adapter_model.safetensors", "score_head.safetensors")


@dataclass(frozen=True)
class Network:
    """A network that a night reads, as far as its folder tells; None stands for a number that it does not tell.

    key: the config key that names the folder. matrices: names of its weights with two axes, `.weight` left off.
    """

    key: str
    place: str
    num_layers: int | None
    max_positions: int | None
    matrices: frozenset[str]

    def __str__(self) -> str:
        return f"{self.key} ({self.place})"


def check_models(config: NightConfig) -> None:
    """Folders are whole, and layers, lengths and adapters fit them. Raises what is wrong, all of it at once."""
    problems = list(_problems(config))
    if len(problems) == 1:
        raise problems[0]
    if problems:
        kind = ModelFolderError if any(isinstance(error, ModelFolderError) for error in problems) else ConfigError
        raise kind("\n- ".join(str(error) for error in problems))


def _problems(config: NightConfig) -> Iterator[NightjarError]:
    found: dict[str, Network] = {}
    for key, place in _folders(config).items():
        try:
            found[key] = _network(config, key, place)
        except ModelFolderError as error:
            yield error
        except OSError as error:
            yield _unreadable(f"{key}: {place}", error)
    checks: list[Callable[[], None]] = [partial(_check_lengths, config, network) for network in found.values()]
    for network, section, kept in _readers(config, found):
        checks += [partial(_check_layers, config, network, kept)] if kept else []
        checks += [partial(_check_targets, config, network, section)]
    checks.append(partial(_check_adapter, config))
    for check in checks:
        try:
            check()
        except (ConfigError, ModelFolderError) as error:
            yield error
        except OSError as error:
            yield _unreadable(error.filename or "a file of a model", error)


def _unreadable(what: str, error: OSError) -> ModelFolderError:
    return ModelFolderError(f"{what}: cannot be read: {error.strerror or error}", "check the path and its permissions")


def wants_sft(config: NightConfig) -> bool:
    """Whether a night trains its base by imitation first: `auto` leaves an instruct model as it is."""
    if config.sft.run != "auto":
        return config.sft.run == "always"
    return config.models.base == QUICKSTART_BASE or not has_chat_template(Path(config.models.base))


def _folders(config: NightConfig) -> dict[str, str]:
    """Config key to the folder that a night will read. A key that is not used is not looked at."""
    models = config.models
    found = {"models.base": models.base}
    if models.teacher is not None and _has_teacher(config):
        found["models.teacher"] = models.teacher
    if models.student is not None and _has_student(config):
        found["models.student"] = models.student
    return found


def _has_teacher(config: NightConfig) -> bool:
    return config.reward.kind == "model"


def _has_student(config: NightConfig) -> bool:
    return _has_teacher(config) and config.distill.enabled


def _network(config: NightConfig, key: str, place: str) -> Network:
    if key == "models.base" and place == QUICKSTART_BASE:
        layers = config.models.quickstart_layers
        names = (f"model.layers.{layer}.{matrix}" for layer in range(layers) for matrix in _LLAMA_MATRICES)
        return Network(key, place, layers, None, frozenset(names))
    folder = check_model_folder(place, key)
    return Network(key, place, folder.num_layers, folder.max_positions, folder.matrices)


def _readers(config: NightConfig, found: dict[str, Network]) -> Iterator[tuple[Network, str, str | None]]:
    """Who reads which network: the network, the section with the adapter, and the key that cuts its layers."""
    readers: list[tuple[str, str, str | None]] = []
    if "models.base" in found and wants_sft(config):
        readers.append(("models.base", "sft", None))
    if _has_teacher(config):
        readers.append(("models.teacher" if config.models.teacher else "models.base", "reward", "teacher_layers"))
    if _has_student(config):
        readers.append(("models.student" if config.models.student else "models.base", "distill", "student_layers"))
    yield from ((found[key], section, kept) for key, section, kept in readers if key in found)


def _check_lengths(config: NightConfig, network: Network) -> None:
    models, limit = config.models, network.max_positions
    longest = models.max_prompt_length + models.max_response_length
    if limit is not None and longest > limit:
        raise ConfigError(
            f"models.max_prompt_length ({models.max_prompt_length}) + models.max_response_length "
            f"({models.max_response_length}) = {longest} tokens, and {network} reads at most {limit}",
            f"lower them until they add up to {limit} at most, or name a model that reads more",
        )


def _check_layers(config: NightConfig, network: Network, key: str) -> None:
    wanted, there = getattr(config.models, key), network.num_layers
    if wanted is not None and there is not None and wanted > there:
        raise ConfigError(
            f"models.{key} is {wanted}, and {network} has {there} decoder layers",
            f"write at most {there}, or remove the key to keep all of them",
        )


def _check_targets(config: NightConfig, network: Network, section: str) -> None:
    """A name in the list that fits nothing would be passed over in silence, as long as another one fits."""
    settings: SupervisedConfig = getattr(config, section)
    targets = settings.lora_target_modules
    if settings.lora_rank == 0 or targets == "all-linear":
        return
    names = {*network.matrices, "lm_head"}
    if isinstance(targets, str):
        strange = [] if _matches(targets, names) else [targets]
    else:
        strange = [wanted for wanted in targets if not any(f".{name}".endswith(f".{wanted}") for name in names)]
    if strange:
        known = ", ".join(sorted({name.rpartition(".")[2] for name in names}))
        raise ConfigError(
            f"{section}.lora_target_modules: {', '.join(map(repr, strange))} fits no module of {network}",
            f"write all-linear, or names out of: {known}",
        )


def _matches(pattern: str, names: set[str]) -> bool:
    """Whether PEFT, which reads a single text as a regular expression for whole names, would find a module."""
    try:
        return any(re.fullmatch(pattern, name) for name in names)
    except re.error:
        return False


def _check_adapter(config: NightConfig) -> None:
    """The folder to continue from holds an adapter and its score head."""
    start = config.distill.continue_from
    if start is None or start == "champion" or not _has_student(config) or config.distill.lora_rank == 0:
        return
    folder, role = Path(start), "distill.continue_from"
    for name in ADAPTER_FILES:
        if not (folder / name).is_file():
            raise ModelFolderError(
                f"{role}: {start}: no {name} in it",
                "name the folder of an adapter saved by an earlier distill stage, `champion`, or remove the key",
            )
        read_shapes(folder / name, role)
    try:
        read_json(folder / "adapter_config.json")
    except ContractError as error:
        raise ModelFolderError(f"{role}: {error.message}", "copy the whole adapter folder") from None
