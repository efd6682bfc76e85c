"""Pictures of a finished home's MLflow and Prefect pages: `python docs/screenshots.py HOME OUTPUT [--night NAME]`.

Needs, beside Nightjar, `pip install selenium` and chromium with chromedriver on the PATH. Works on copies of the
home's two databases, so nothing in the home changes and a server that is open on it is not disturbed.
"""

from __future__ import annotations

import argparse
import io
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from PIL import Image
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.wait import WebDriverWait

SIZE = (1400, 1000)
START_SECONDS = 180.0
PAGE_SECONDS = 90.0
# Charts and the task graph move into place after their text is there.
SETTLE_SECONDS = 6.0
PPO_CHARTS = "^(heldout_reward|kl_ref|kl_coef|reward_mean|approx_kl|explained_variance)$"
QUIET = {
    "DO_NOT_TRACK": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
}
CHROMIUM = [
    *("--headless=new", "--hide-scrollbars", "--disable-gpu", "--disable-quic", "--no-first-run", "--no-proxy-server"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]


@dataclass(frozen=True)
class Night:
    """Where one night's pages are: identifiers in MLflow and in Prefect. `earlier`: the run of the night before it."""

    name: str
    experiment: str
    run: str
    ppo: str
    model: str
    version: str
    earlier: str | None
    flow_run: str
    artifact: str


def copy_database(source: Path, target: Path) -> Path:
    """A consistent copy, with what still lies in the write-ahead log. Raises when there is no such file."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with (
        closing(sqlite3.connect(f"{source.as_uri()}?mode=ro", uri=True)) as old,
        closing(sqlite3.connect(target)) as new,
    ):
        old.backup(new)
    return target


def find_night(mlflow: Path, prefect: Path, name: str | None) -> Night:
    """The named night, or the last promoted one. Raises SystemExit when it is not in both databases."""
    query = (
        "select p.name, p.experiment_id, p.run_uuid, c.run_uuid, v.name, v.version from runs p "
        "join tags t on t.key = 'mlflow.parentRunId' and t.value = p.run_uuid "
        "join runs c on c.run_uuid = t.run_uuid and c.name = 'ppo' "
        "join model_version_tags v on v.key = 'nightjar.night' and v.value = p.name "
        "where p.name = coalesce(?, p.name) order by p.start_time desc limit 1"
    )
    with closing(sqlite3.connect(mlflow)) as database:
        row = database.execute(query, (name,)).fetchone()
        before = database.execute(
            "select b.run_uuid from runs b join runs p on p.run_uuid = ? and b.experiment_id = p.experiment_id "
            "join tags t on t.run_uuid = b.run_uuid and t.key = 'nightjar.stage' and t.value = 'night' "
            "where b.start_time < p.start_time order by b.start_time desc limit 1",
            (row[2] if row else "",),
        ).fetchone()
    if row is None:
        raise SystemExit(f"no registered night {name or ''} in this home; `nightjar status` lists the nights")
    with closing(sqlite3.connect(prefect)) as database:
        page = database.execute("select flow_run_id, id from artifact where key = ?", (f"{row[0]}-summary",)).fetchone()
    if page is None:
        raise SystemExit(f"the home's Prefect database has no summary of {row[0]}; did it run on another server?")
    return Night(*map(str, row), before[0] if before else None, *map(str, page))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def serving(arguments: list[str], port: int, health: str, folder: Path, **environment: str) -> Iterator[str]:
    """A server as a child on loopback; yields its address, ends it and its workers at the end."""
    address = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", *arguments, "--host", "127.0.0.1", "--port", str(port)]
    with (folder / f"{arguments[0]}.log").open("wb") as log:
        server = subprocess.Popen(
            command, cwd=folder, env=os.environ | QUIET | environment, stdout=log, stderr=log, start_new_session=True
        )
    try:
        wait_until_up(server, address + health, Path(log.name))
        yield address
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(30)


def wait_until_up(server: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while server.poll() is None and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(1)
    raise SystemExit(f"{url} does not answer:\n{log.read_text(errors='replace')[-2000:]}")


class Camera:
    """One browser window of SIZE that opens pages, waits for what they must show, and saves them."""

    def __init__(self, profile: Path, output: Path) -> None:
        options = webdriver.ChromeOptions()
        options.binary_location = shutil.which("chromium") or shutil.which("google-chrome") or ""
        sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
        for flag in [*CHROMIUM, *sandbox, f"--user-data-dir={profile}"]:
            options.add_argument(flag)
        service = webdriver.ChromeService(executable_path=shutil.which("chromedriver"))
        self.browser = webdriver.Chrome(options=options, service=service)
        width, height = SIZE
        window = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", window)
        self.output = output

    def open(self, url: str, shows: str) -> None:
        # Two addresses that differ after the # alone are one page to the browser: nothing would load anew.
        self.browser.get("about:blank")
        self.browser.get(url)
        self.find(f"//*[text()[contains(., '{shows}')]]")

    def find(self, xpath: str) -> WebElement:
        wait = WebDriverWait(self.browser, PAGE_SECONDS)
        return wait.until(lambda browser: browser.find_element(By.XPATH, xpath), f"the page never showed {xpath}")

    def click(self, xpath: str) -> None:
        self.browser.execute_script("arguments[0].click()", self.find(xpath))

    def scroll_to(self, xpath: str) -> None:
        self.browser.execute_script("arguments[0].scrollIntoView({block: 'start'})", self.find(xpath))

    def save(self, name: str) -> None:
        """256 colours are enough for these pages and keep the file small."""
        # Without a mouse the browser shows the charts' buttons all the time, over the curves.
        style = "document.head.insertAdjacentHTML('beforeend', '<style>.modebar{display:none!important}</style>')"
        self.browser.execute_script(style)
        time.sleep(SETTLE_SECONDS)
        picture = Image.open(io.BytesIO(self.browser.get_screenshot_as_png())).convert("RGB")
        picture.quantize(256, dither=Image.Dither.NONE).save(self.output / f"{name}.png", optimize=True)


def picture_mlflow(camera: Camera, address: str, night: Night) -> None:
    """The night's run with the gate's note, what the note shows below, the curves of PPO, versions, two nights."""
    run = f"{address}/#/experiments/{night.experiment}/runs"
    camera.browser.get(f"{address}/health")
    camera.browser.execute_script("localStorage.setItem('mlflow.assistant.fab.autoOpenedOnFirstLoad_v1', 'true')")
    camera.open(f"{run}/{night.run}", "Description")
    camera.click("//*[normalize-space(text())='Model training']")
    camera.open(f"{run}/{night.run}", "Description")
    camera.click("//button[@aria-label='Expand description']")
    camera.save("mlflow-night")
    camera.scroll_to("//h2[contains(., 'Curves')]")
    camera.save("mlflow-curves")
    camera.scroll_to("//h2[contains(., 'Answers')]")
    camera.save("mlflow-answers")
    camera.open(f"{run}/{night.ppo}/model-metrics", "Model metrics")
    camera.find("//input[@placeholder='Search metric charts']").send_keys(PPO_CHARTS)
    camera.save("mlflow-ppo")
    camera.open(f"{address}/#/models/{night.model}", "champion")
    camera.save("mlflow-versions")
    camera.open(f"{address}/#/models/{night.model}/versions/{night.version}", "nightjar.code_version")
    camera.save("mlflow-version")
    if night.earlier is not None:
        both = quote(f'["{night.run}","{night.earlier}"]')
        experiment = quote(f'["{night.experiment}"]')
        camera.open(f"{address}/#/compare-runs?runs={both}&experiments={experiment}", "Comparing")
        # It opens with a plot of one metric; the numbers of both nights side by side are in a box further down.
        camera.scroll_to("//*[normalize-space(text())='Metrics']")
        camera.save("mlflow-compare")


def picture_prefect(camera: Camera, address: str, night: Night) -> None:
    """The flow run with its tasks in time and its artifacts, and the summary artifact itself."""
    camera.open(f"{address}/runs/flow-run/{night.flow_run}", "Completed")
    camera.click("//*[text()[normalize-space(.)='Artifacts']]")
    camera.save("prefect-night")
    camera.open(f"{address}/artifacts/artifact/{night.artifact}", "blocking rules")
    camera.save("prefect-summary")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("home", type=Path, help="a home with at least one promoted night")
    parser.add_argument("output", type=Path, help="folder for the PNG files")
    parser.add_argument("--night", help="name of the night; without it the last one that was registered")
    arguments = parser.parse_args()
    home, output = arguments.home.resolve(), arguments.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    os.environ["NO_PROXY"] = os.environ["no_proxy"] = "127.0.0.1,localhost"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        folder = Path(scratch)
        mlflow = copy_database(home / "mlflow.db", folder / "mlflow.db")
        prefect = copy_database(home / "prefect" / "prefect.db", folder / "prefect" / "prefect.db")
        night = find_night(mlflow, prefect, arguments.night)
        picture(night, home, folder, Camera(folder / "profile", output))


def picture(night: Night, home: Path, folder: Path, camera: Camera) -> None:
    """One server at a time: both together are much for a small machine."""
    port = free_port()
    mlflow = ["mlflow", "server", "--backend-store-uri", f"sqlite:///{folder / 'mlflow.db'}", "--workers", "1"]
    mlflow += ["--default-artifact-root", (home / "mlartifacts").as_uri()]
    prefect = ["prefect", "server", "start", "--no-services"]
    settings = {
        "PREFECT_HOME": str(folder / "prefect"),
        "PREFECT_UI_API_URL": f"http://127.0.0.1:{port}/api",
        "PREFECT_UI_STATIC_DIRECTORY": str(folder / "pages"),
    }
    try:
        with serving(mlflow, port, "/health", folder) as address:
            picture_mlflow(camera, address, night)
        with serving(prefect, port, "/api/health", folder, **settings) as address:
            picture_prefect(camera, address, night)
    finally:
        camera.browser.quit()


if __name__ == "__main__":
    main()
