"""A headless Chromium that opens pages, waits for what they must show, and saves them as small PNG files."""

from __future__ import annotations

import io
import os
import shutil
import time
from pathlib import Path

from PIL import Image
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.wait import WebDriverWait

WIDTH, HEIGHT = 1400, 1000
PAGE_SECONDS = 90.0
# Charts and the task graph move into place after their text is there.
SETTLE_SECONDS = 6.0
CHROMIUM = [
    *("--headless=new", "--hide-scrollbars", "--disable-gpu", "--disable-quic", "--no-first-run", "--no-proxy-server"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]


class Camera:
    """One browser window of WIDTH by HEIGHT."""

    def __init__(self, profile: Path, output: Path) -> None:
        options = webdriver.ChromeOptions()
        options.binary_location = shutil.which("chromium") or shutil.which("google-chrome") or ""
        sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
        for flag in [*CHROMIUM, *sandbox, f"--user-data-dir={profile}"]:
            options.add_argument(flag)
        service = webdriver.ChromeService(executable_path=shutil.which("chromedriver"))
        self.browser = webdriver.Chrome(options=options, service=service)
        self.output = output
        self.resize()

    def resize(self, height: int = HEIGHT) -> None:
        window = {"width": WIDTH, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", window)

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

    def wait_for_drawing(self, xpath: str) -> None:
        """Until a canvas, whose content no text tells, shows more than greys: at most PAGE_SECONDS."""
        canvas = self.find(xpath)
        deadline = time.monotonic() + PAGE_SECONDS
        while time.monotonic() < deadline and not is_coloured(canvas.screenshot_as_png):
            time.sleep(1)

    def save(self, name: str) -> None:
        """256 colours are enough for these pages and keep the file small."""
        # Without a mouse the browser shows the charts' buttons all the time, over the curves.
        style = "document.head.insertAdjacentHTML('beforeend', '<style>.modebar{display:none!important}</style>')"
        self.browser.execute_script(style)
        time.sleep(SETTLE_SECONDS)
        picture = Image.open(io.BytesIO(self.browser.get_screenshot_as_png())).convert("RGB")
        picture.quantize(256, dither=Image.Dither.NONE).save(self.output / f"{name}.png", optimize=True)


def is_coloured(png: bytes) -> bool:
    """Whether a hundredth of the picture is of a strong colour."""
    saturation = Image.open(io.BytesIO(png)).convert("HSV").getchannel("S").histogram()
    return sum(saturation[128:]) > sum(saturation) / 100
