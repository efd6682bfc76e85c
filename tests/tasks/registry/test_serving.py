"""What is served: a fresh process, no pickle, every kind of input; and what a broken version says."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tasks.candidate import RegisterRun, ServingSettings, fetch_champion, fetch_version, register_candidate
from tasks.model_manifest import ModelFiles, hashes, stored_folder
from tasks.promotion import promote
from tasks.registry import Version
from tasks.registry_errors import ServingError, StoredBytesDiffer
from tasks.serving import ServingWorker
from tasks.site import Site
from tasks.version_tags import Lineage
from training.errors import ModelFolderError

Register = Callable[..., Version]
ROOT = Path(__file__).resolve().parents[3]

# Run as a user would, in a process that never saw the flow.
FRESH = """
import json, sys
import mlflow, pandas as pd
mlflow.set_tracking_uri(sys.argv[1])
model = mlflow.pyfunc.load_model("models:/nightjar-policy@champion")
chat = [{"role": "user", "content": "Hello, who are you?"}]
texts = ["Hello, who are you?", "What is two plus three?"]
few = {"max_new_tokens": 4}
out = {
    "list": model.predict(texts, params=few),
    "again": model.predict(texts, params=few),
    "one": [model.predict(text, params=few)[0] for text in texts],
    "frame": model.predict(pd.DataFrame({"prompt": texts}), params=few),
    "chat": model.predict(pd.DataFrame({"messages": [chat]}), params=few),
    "records": model.predict([{"messages": chat}], params=few),
    "default": model.predict(texts[:1]),
    "eight": model.predict(texts[:1], params={"max_new_tokens": 8}),
    "warm": model.predict(texts, params={**few, "temperature": 1.0, "seed": 1}),
    "warm_again": model.predict(texts, params={**few, "temperature": 1.0, "seed": 1}),
    "other_seed": model.predict(texts, params={**few, "temperature": 1.0, "seed": 2}),
    "signature": model.metadata.signature.to_dict(),
}
try:
    model.predict(pd.DataFrame({"id": [1], "prompt": ["x"]}))
except Exception as error:
    out["refused"] = str(error)
print(json.dumps(out))
"""


def test_champion_answers_in_a_fresh_process_without_pickle(site: Site, register: Register, tmp_path: Path) -> None:
    promote(site, register(1).number, judged_against=None)
    environment = os.environ | {"MLFLOW_ALLOW_PICKLE_DESERIALIZATION": "false", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", FRESH, site.tracking_uri]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    out = json.loads(done.stdout.splitlines()[-1])
    assert len(out["list"]) == 2
    assert all(isinstance(answer, str) for answer in out["list"])
    assert any(out["list"])
    assert out["list"] == out["again"] == out["one"] == out["frame"]
    assert out["chat"] == out["records"] == out["list"][:1]
    assert out["default"] == out["eight"]
    assert out["warm"] == out["warm_again"] != out["other_seed"]
    assert "id" in out["refused"]
    params = json.loads(out["signature"]["params"])
    assert {param["name"]: param["default"] for param in params} == {"max_new_tokens": 8, "temperature": 0.0, "seed": 0}
    with site.stored(site.registry.version("1")) as folder:
        assert {path.suffix for path in folder.rglob("*") if path.is_file()} <= {
            "", ".json", ".jinja", ".py", ".safetensors", ".txt", ".yaml",
        }  # fmt: skip


def test_the_chat_template_is_applied_once(
    site: Site, experiment: str, tmp_path: Path, build: Callable[..., Path], chat_template: str, lineage: Lineage
) -> None:
    """What a version with a template answers is what the network gives for the tokens written by hand."""
    import torch

    from training.models.backbone import Backbone
    from training.models.network import Network
    from training.models.sampling import SamplingSettings, sample_responses
    from training.models.tokenize import decode_response

    folder = build(tmp_path / "model", 5, chat_template)
    version = register_candidate(
        site, ModelFiles(folder), "n", lineage, RegisterRun(experiment, {}), ServingSettings(max_new_tokens=8)
    )
    with site.stored(version) as stored, site.worker() as worker:
        answers = worker.answer(str(stored), ["Hello, who are you?"], 8)

    backbone = Backbone.load(folder, device=torch.device("cpu"))
    by_hand = backbone.tokenizer("<|user|> Hello, who are you? <eos> <|assistant|>", add_special_tokens=False)
    settings = SamplingSettings(max_new_tokens=8, temperature=0.0)
    (sample,) = sample_responses(Network(backbone), [by_hand["input_ids"]], settings, torch.Generator())
    assert answers.texts == (decode_response(backbone.tokenizer, sample.token_ids),)
    assert answers.model_id == version.model_id


def test_a_version_is_logged_in_the_run_that_the_night_shows(
    site: Site, experiment: str, model_folder: Callable[[int], Path], lineage: Lineage
) -> None:
    client = site.registry.client
    shown = client.create_run(experiment, run_name="register").info.run_id
    run = RegisterRun(experiment, {}, shown)
    version = register_candidate(site, ModelFiles(model_folder(1)), "n", lineage, run, ServingSettings())
    assert version.run_id == shown
    assert [found.info.run_id for found in client.search_runs([experiment])] == [shown]
    assert client.get_run(shown).info.status == "FINISHED"


def test_logged_name_of_the_run_is_a_short_run_of_its_own(site: Site, register: Register) -> None:
    version = register(1)
    assert version.run_id is not None
    run = site.registry.client.get_run(version.run_id)
    assert (run.info.status, run.info.run_name) == ("FINISHED", "register")


def test_fetched_champion_is_the_uploaded_folder(
    site: Site, register: Register, model_folder: Callable[[int], Path], tmp_path: Path
) -> None:
    assert fetch_champion(site, tmp_path / "nothing") is None
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text('{"r": 4}')
    version = register(1, adapter=adapter)
    promote(site, version.number, judged_against=None)

    fetched = fetch_champion(site, tmp_path / "fetched")

    assert fetched is not None
    assert fetched.version == version.number
    assert hashes(fetched.files.model) == hashes(model_folder(1))
    assert fetched.files.adapter is not None
    assert hashes(fetched.files.adapter) == hashes(adapter)
    assert fetch_version(site, version.number, tmp_path / "fetched").digest == fetched.digest


def test_fetching_changed_bytes_is_refused(site: Site, register: Register, tmp_path: Path) -> None:
    version = register(1)
    with site.stored(version) as folder:
        next(folder.rglob("config.json")).write_text("{}")
    with pytest.raises(StoredBytesDiffer, match=r"config\.json differs"):
        fetch_version(site, version.number, tmp_path / "fetched")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "optimizer.pt"])
def test_pickles_are_never_uploaded(
    site: Site, experiment: str, model_folder: Callable[[int], Path], tmp_path: Path, lineage: Lineage, name: str
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model_folder(1), folder)
    (folder / name).write_bytes(b"\x80\x04.")
    with pytest.raises(ModelFolderError, match=name):
        register_candidate(site, ModelFiles(folder), "n", lineage, RegisterRun(experiment, {}), ServingSettings())


def test_links_out_of_the_folder_are_refused(
    site: Site, experiment: str, model_folder: Callable[[int], Path], tmp_path: Path, lineage: Lineage
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model_folder(1), folder)
    (tmp_path / "secret.txt").write_text("secret")
    (folder / "notes.txt").symlink_to(tmp_path / "secret.txt")
    with pytest.raises(ModelFolderError, match="leaves the folder"):
        register_candidate(site, ModelFiles(folder), "n", lineage, RegisterRun(experiment, {}), ServingSettings())


def test_a_path_that_leaves_the_stored_model_is_refused(site: Site, register: Register, tmp_path: Path) -> None:
    with site.stored(register(1)) as folder:
        shutil.copytree(folder, tmp_path / "copy")
    meta = tmp_path / "copy" / "MLmodel"
    meta.write_text(meta.read_text().replace("path: artifacts/model", "path: ../../etc"))
    with pytest.raises(StoredBytesDiffer, match="outside the stored model"):
        stored_folder(tmp_path / "copy", "model")


def test_a_warm_site_uses_one_child_and_replaces_a_dead_one(site: Site) -> None:
    with replace(site, shared=None).warm() as warm:
        with warm.worker() as one, warm.worker() as two:
            assert one is two
        assert one._process is not None
        one._process.kill()
        one._process.wait()
        with warm.worker() as three:
            assert three is not one
            assert three.alive
        assert not three.alive


def test_a_child_that_dies_or_hangs_is_an_error_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ServingWorker("sqlite://", tmp_path, 30.0) as worker:
        assert worker._process is not None
        worker._process.kill()
        with pytest.raises(ServingError, match="child ended"):
            worker.answer("anything", ["x"], 1)
    with ServingWorker("sqlite://", tmp_path, 0.01) as worker, pytest.raises(ServingError, match=r"took over 0\.01 s"):
        worker.answer("anything", ["x"], 1)
    assert list(tmp_path.iterdir()) == []


def test_an_error_of_the_child_does_not_repeat_a_servers_password(tmp_path: Path) -> None:
    with ServingWorker("http://bob:s3cret@127.0.0.1:1", tmp_path, 300.0) as worker, pytest.raises(ServingError) as told:
        worker.answer("models:/m@champion", ["x"], 1)
    assert "s3cret" not in str(told.value)
    assert "127.0.0.1" in str(told.value), "the address itself is told"


def test_an_interrupted_question_ends_the_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: ServingWorker) -> bytes:
        raise KeyboardInterrupt

    monkeypatch.setattr(ServingWorker, "_read_line", interrupted)
    with ServingWorker("sqlite://", tmp_path, 30.0) as worker:
        with pytest.raises(KeyboardInterrupt):
            worker.answer("anything", ["x"], 1)
        assert worker._process is not None
        worker._process.wait(30)
        assert not worker.alive
