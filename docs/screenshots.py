"""Pictures of a night's MLflow and Prefect pages: `python docs/screenshots.py [--stack] HOME OUTPUT [--night NAME]`.

With `--stack` the pages are those of running servers: the ones in HOME/stack/env (`make stack`), or in PREFECT_API_URL
and MLFLOW_TRACKING_URI. Without it two servers are started on copies of the databases of an embedded HOME.
Needs, beside Nightjar, `pip install selenium` and chromium with chromedriver on the PATH.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from urllib.parse import quote, urlencode

from browser import Camera
from home_copy import mlflow_of, prefect_of
from night_lookup import NightInMlflow, NightInPrefect, find_in_mlflow, find_in_prefect, stack_addresses

PPO_CHARTS = "^(heldout_reward|kl_ref|kl_coef|reward_mean|approx_kl|explained_variance)$"
COMPARED_HEIGHT, TABLE_HEIGHT = 1600, 600
NIGHT_COLUMNS = [
    "tags.`nightjar.verdict`",
    *(f"metrics.`final/{name}`" for name in ("gold_reward", "gold_reward.champion", "reward", "kl_ref", "eos_rate")),
]


def picture_mlflow(camera: Camera, address: str, night: NightInMlflow) -> None:
    """The night's run with the gate's note, what the note shows below, the curves of PPO, its version, two nights."""
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
    camera.open(f"{address}/#/models/{night.model}/versions/{night.version}", "nightjar.code_version")
    camera.save("mlflow-version")
    if night.earlier is not None:
        picture_nights(camera, address, night)
        picture_two_nights(camera, address, night)


def picture_two_nights(camera: Camera, address: str, night: NightInMlflow) -> None:
    """The night and the one before it on MLflow's compare page: what differs, and their pages beside each other."""
    both = quote(f'["{night.run}","{night.earlier}"]')
    experiment = quote(f'["{night.experiment}"]')
    camera.resize(COMPARED_HEIGHT)
    camera.open(f"{address}/#/compare-runs?runs={both}&experiments={experiment}", "Comparing")
    for section in ("Visualizations", "Parameters", "Tags"):
        camera.click(f"//*[@aria-label='collapse {section}']")
    camera.click("//button[@aria-label='Metrics - Show diff only']")
    camera.click("//*[text()[normalize-space(.)='summary.md']]")
    camera.save("mlflow-compare")
    camera.resize()


def picture_nights(camera: Camera, address: str, night: NightInMlflow) -> None:
    """All nights in the experiment's table of runs, with the columns of NIGHT_COLUMNS chosen."""
    query = urlencode({"searchFilter": "tags.`nightjar.stage` = 'night'"})
    table = f"{address}/#/experiments/{night.experiment}/runs?{query}"
    camera.open(table, night.name)
    # What a click on each in the menu "Columns" leaves behind.
    key = f'MLflowLocalStorage-1.1-ExperimentPage-["{night.experiment}"]-ReactComponentState'
    choose = "const kept = JSON.parse(localStorage.getItem(arguments[0])); kept.selectedColumns = arguments[1];"
    choose += "localStorage.setItem(arguments[0], JSON.stringify(kept))"
    camera.browser.execute_script(choose, key, NIGHT_COLUMNS)
    camera.resize(TABLE_HEIGHT)
    camera.open(table, night.name)
    camera.save("mlflow-nights")
    camera.resize()


def picture_prefect(camera: Camera, address: str, night: NightInPrefect) -> None:
    """The flow run with its tasks in time and its artifacts, and the summary artifact itself."""
    camera.open(f"{address}/runs/flow-run/{night.flow_run}", "Artifacts")
    camera.click("//*[text()[normalize-space(.)='Artifacts']]")
    camera.find(f"//*[text()[contains(., '{night.key}')]]")
    camera.wait_for_drawing("//canvas")
    camera.save("prefect-night")
    camera.open(f"{address}/artifacts/artifact/{night.artifact}", "Gate")
    camera.save("prefect-summary")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("home", type=Path, help="a home with at least one registered night")
    parser.add_argument("output", type=Path, help="folder for the PNG files")
    parser.add_argument("--stack", action="store_true", help="picture the pages of running servers")
    parser.add_argument("--night", help="name of the night; without it the last one that was registered")
    arguments = parser.parse_args()
    home, output = arguments.home.resolve(), arguments.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    os.environ["NO_PROXY"] = os.environ["no_proxy"] = "127.0.0.1,localhost"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        mlflow, prefect = servers(home, Path(scratch), arguments.stack)
        camera = Camera(Path(scratch) / "profile", output)
        try:
            picture(camera, mlflow, prefect, arguments.night)
        finally:
            camera.browser.quit()


Server = AbstractContextManager[str]


def servers(home: Path, folder: Path, stack: bool) -> tuple[Server, Server]:
    """MLflow and Prefect, each as a context that gives its address: running ones, or copies that are started."""
    if stack:
        there = stack_addresses(home)
        return nullcontext(there.mlflow), nullcontext(there.prefect)
    return mlflow_of(home, folder), prefect_of(home, folder)


def picture(camera: Camera, mlflow: Server, prefect: Server, name: str | None) -> None:
    """One server at a time: both together are much for a small machine."""
    with mlflow as address:
        night = find_in_mlflow(address, name)
        picture_mlflow(camera, address, night)
    with prefect as address:
        picture_prefect(camera, address, find_in_prefect(address, night.name))


if __name__ == "__main__":
    main()
