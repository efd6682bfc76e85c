"""Real MLflow on SQLite, and a real model small enough to load in no time."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")

from configs.schema.registry import RegistryConfig
from tasks.candidate import RegisterRun, ServingSettings, register_candidate
from tasks.mlflow_client import ARTIFACTS, SERVER_ENVIRONMENT, connect, mlflow_environment
from tasks.model_manifest import ModelFiles
from tasks.registry import Version
from tasks.serving import ServingWorker
from tasks.site import Site
from tasks.version_tags import Lineage

LINES = [
    "Hello, who are you? I am a small model.",
    "What is two plus three? It is five, thank you for asking.",
    "User: what is one plus one? Assistant: two",
]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|> {{ message['content'] }} {{ eos_token }} {% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
LINEAGE = Lineage(verdict="PASS", data_sha256="d" * 64, config_hash="c" * 64, code_version="1.2.3")


def build_model(folder: Path, seed: int, chat_template: str | None = None) -> Path:
    """A Llama with random weights and a word tokenizer, as a Hugging Face folder."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel(unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.train_from_iterator(LINES, trainers.WordLevelTrainer(special_tokens=["<unk>", "<bos>", "<eos>", "<pad>"]))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="<unk>", bos_token="<bos>", eos_token="<eos>", pad_token="<pad>"
    )
    tokenizer.chat_template = chat_template
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=3,
    )
    torch.manual_seed(seed)
    LlamaForCausalLM(config).save_pretrained(folder, safe_serialization=True)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """Model folders by seed, each built once."""
    root, built = tmp_path_factory.mktemp("models"), {}

    def get(seed: int) -> Path:
        if seed not in built:
            built[seed] = build_model(root / str(seed) / "model", seed)
        return built[seed]

    return get


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A migrated database, copied for every test: migrating takes seconds."""
    file = tmp_path_factory.mktemp("database") / "mlflow.db"
    connect(f"sqlite:///{file}").search_experiments(max_results=1)
    return file


@pytest.fixture(scope="session")
def shared_worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServingWorker]:
    """One real serving child for the whole session: starting it costs more than everything that it does here."""
    with ServingWorker("set per test", tmp_path_factory.mktemp("worker"), 900.0) as worker:
        yield worker


@pytest.fixture
def home(tmp_path: Path, empty_database: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with an empty MLflow."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    folder = tmp_path / "home"
    folder.mkdir()
    shutil.copy(empty_database, folder / "mlflow.db")
    return folder


@pytest.fixture
def make_site(shared_worker: ServingWorker) -> Callable[[Path, RegistryConfig], Site]:
    """A site with the session's serving child: (home, config)."""


    def make(home: Path, config: RegistryConfig) -> Site:
        opened = Site.open(home, config)
        shared_worker.tracking_uri = opened.tracking_uri
        return replace(opened, shared=shared_worker)

    return make


@pytest.fixture
def site(home: Path, make_site: Callable[[Path, RegistryConfig], Site]) -> Site:
    """The site of that home."""
    return make_site(home, RegistryConfig(lock_wait_seconds=0.5, verify_max_new_tokens=4))


@pytest.fixture
def experiment(site: Site) -> str:
    """An experiment with its artifacts in the home."""
    return site.registry.client.create_experiment("nightjar", (site.home / ARTIFACTS).as_uri())


@pytest.fixture
def register(site: Site, experiment: str, model_folder: Callable[[int], Path]) -> Callable[..., Version]:
    """Register the model of a seed as the candidate of a night."""

    def add(seed: int, night: str | None = None, adapter: Path | None = None) -> Version:
        files = ModelFiles(model_folder(seed), adapter)
        run = RegisterRun(experiment, {})
        settings = ServingSettings(max_new_tokens=8)
        return register_candidate(site, files, night or f"night-{seed}", LINEAGE, run, settings)

    return add


@pytest.fixture
def build() -> Callable[..., Path]:
    """Build a model folder: (folder, seed, chat_template)."""
    return build_model


@pytest.fixture
def chat_template() -> str:
    """A template with a turn a message."""
    return CHAT_TEMPLATE


@pytest.fixture
def lineage() -> Lineage:
    """A version's lineage."""
    return LINEAGE


@pytest.fixture
def start_server() -> Iterator[Callable[[Path, int, str], subprocess.Popen[bytes]]]:
    """Start a real MLflow server with its artifact proxy: (folder, port, allowed hosts). All are ended at the end."""
    started: list[subprocess.Popen[bytes]] = []

    def start(folder: Path, port: int, allowed_hosts: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port)]
        command += ["--workers", "1", "--backend-store-uri", f"sqlite:///{folder}/server.db"]
        command += ["--artifacts-destination", str(folder / "store"), "--allowed-hosts", allowed_hosts]
        environment = os.environ | mlflow_environment() | SERVER_ENVIRONMENT
        with (folder / "server.txt").open("ab") as log:
            server = subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=folder, process_group=0)
        started.append(server)
        for _ in range(900):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1)
                return server
            except OSError:
                time.sleep(0.1)
        raise AssertionError((folder / "server.txt").read_text())

    yield start
    for server in started:
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()
