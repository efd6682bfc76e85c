"""The champion as a night needs it: frozen at the start, with the models that its lineage names."""

from __future__ import annotations

from pathlib import Path

from configs.schema import NightConfig
from tasks.agreement import require_named_champion
from tasks.candidate import fetch_version
from tasks.model_store import find_model, keep_model
from tasks.night_state import FrozenChampion
from tasks.registry import CHAMPION
from tasks.registry_errors import NoChampionYet
from tasks.site import Site
from tasks.stages import Materials, builds_own_base
from tasks.version_tags import REWARD_MODEL
from training.contract import FileRef, file_ref, read_json
from training.errors import ContractError

REFERENCE = "nightjar.reference_sha256"
"""Version tag: the model that anchors this chain's KL; kept in `<home>/models/`."""
BASE = "nightjar.base_sha256"
"""Version tag: the base model below the reference."""
QUICKSTART = "quickstart"


def freeze_champion(site: Site, night_folder: Path) -> FrozenChampion | None:
    """Fetch the champion below the night's folder, every byte checked, and note its lineage; None on a cold start.

    Raises JournalContradicted where the alias was deleted: that is no cold start.
    """
    number = site.registry.alias(CHAMPION)
    if number is None:
        require_named_champion(site)
        return None
    fetched = fetch_version(site, number, night_folder / f"champion-v{number}")
    tags = site.registry.version(number).tags
    return FrozenChampion(
        version=number,
        digest=fetched.digest,
        model=str(fetched.files.model),
        adapter=str(fetched.files.adapter) if fetched.files.adapter is not None else None,
        reference_sha256=tags.get(REFERENCE),
        base_sha256=tags.get(BASE),
        reward_model_sha256=tags.get(REWARD_MODEL),
    )


def no_champion(site: Site) -> NoChampionYet:
    """What to raise before the first promotion, where the alias rightly names nobody."""
    return NoChampionYet(f"{site.model} has no champion yet", "run a night first: nightjar run CONFIG")


def ensure_fetched(site: Site, frozen: FrozenChampion | None) -> None:
    """Fetch the frozen version again when its files are gone or changed. Raises StoredBytesDiffer, RegistryError."""
    if frozen is None:
        return
    folder = Path(frozen.model)
    if not folder.is_dir() or file_ref(folder).sha256 != frozen.digest:
        fetch_version(site, frozen.version, folder.parent)


def lineage_tags(materials: Materials, base_sha256: str) -> dict[str, str]:
    """Tags that let a later night go on from this version."""
    assert materials.reference is not None
    return {REFERENCE: materials.reference.sha256, BASE: base_sha256}


def base_identity(config: NightConfig, base: FileRef | None) -> str:
    """What stands for the base in a lineage: its digest, or the word for the one that is built here."""
    return QUICKSTART if builds_own_base(config) or base is None else base.sha256


def starting_materials(
    config: NightConfig,
    home: Path,
    start: FrozenChampion | None,
    champion: FrozenChampion | None,
    frozen_evaluation: FileRef | None = None,
) -> Materials:
    """What the night has before its first stage: base folders, the champion's files, and what it is warm-started from.

    The champion's reference is taken over only with the same base and unless sft runs every night; without it there is
    no warm start either, since the KL would have two anchors.
    """
    models = config.models
    base = None if builds_own_base(config) else file_ref(Path(models.base))
    is_model = config.reward.kind == "model"
    reference = _taken_over(config, home, base, start)
    adapter = _warm_adapter(config, start) if reference is not None else None
    return Materials(
        frozen_evaluation=frozen_evaluation,
        base=base,
        reference=reference,
        teacher_base=file_ref(Path(models.teacher)) if models.teacher and is_model else None,
        student_base=file_ref(Path(models.student)) if models.student and is_model and config.distill.enabled else None,
        continued_student=_continued_student(config, home, start),
        champion=file_ref(Path(champion.model)) if champion is not None else None,
        warm_adapter=adapter,
        warm_policy=file_ref(Path(start.model)) if start and reference is not None and adapter is None else None,
    )


def keep_lineage(home: Path, materials: Materials) -> None:
    """Keep what a later night needs of this one: the reference and the reward model."""
    for model in (materials.reference, materials.reward_model):
        if model is not None:
            keep_model(home, model)


def _taken_over(
    config: NightConfig, home: Path, base: FileRef | None, start: FrozenChampion | None
) -> FileRef | None:
    if start is None or config.sft.run == "always" or start.base_sha256 != base_identity(config, base):
        return None
    if base is not None and start.reference_sha256 == base.sha256:
        return base
    return find_model(home, start.reference_sha256)


def _warm_adapter(config: NightConfig, start: FrozenChampion | None) -> FileRef | None:
    """The champion's adapter, when the config still asks for one of that rank."""
    if start is None or start.adapter is None or config.ppo.lora_rank == 0:
        return None
    try:
        rank = read_json(Path(start.adapter) / "adapter_config.json").get("r")
    except (ContractError, AttributeError):
        return None
    return file_ref(Path(start.adapter)) if rank == config.ppo.lora_rank else None


def _continued_student(config: NightConfig, home: Path, start: FrozenChampion | None) -> FileRef | None:
    wanted = config.distill.continue_from
    if wanted is None or config.reward.kind != "model" or not config.distill.enabled:
        return None
    if wanted != "champion":
        return file_ref(Path(wanted))
    student = find_model(home, start.reward_model_sha256) if start is not None else None
    is_adapter = student is not None and (Path(student.path) / "adapter_model.safetensors").is_file()
    return student if is_adapter else None
