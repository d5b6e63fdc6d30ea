"""Take the pictures of MLflow's pages and of a report that the README shows, from a store that has a search.

    python docs/take_pictures.py --root plait-runs --search NAME --out docs/images

Needs selenium and Debian's packages chromium and chromium-driver. The search is a real one: nothing is
drawn here.
"""

from __future__ import annotations

import argparse
import base64
import os
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

from plait.core.settings import TrackingSettings
from plait.tracking.results import load_search
from plait.tracking.ui import ui_command
from plait_dashboards.figures import all_figures
from plait_dashboards.page import report
from plait_dashboards.reading import read_sweep

CHROMIUM, DRIVER = Path("/usr/bin/chromium"), Path("/usr/bin/chromedriver")
OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--use-angle=swiftshader",  # WebGL without a graphics card
    "--enable-unsafe-swiftshader",
    "--disable-gpu-compositing",  # the rest of a page, by WebGL's software, takes longer than without
    "--disable-gpu-rasterization",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)
SECONDS, POLL = 60, 0.1
MOST_JOBS = 8  # that fit on a page
# What MLflow's pages would otherwise put in front of the runs on a first visit.
STORED = {
    "mlflow.assistant.fab.autoOpenedOnFirstLoad_v1": "true",
    "mlflow.assistant.panelOpen_v1": "false",
    "mlflow.workflowType_v1": '"machine_learning"',
}
DRAWN_CURVES = """
const curves = {};
for (const plot of document.querySelectorAll('.js-plotly-plot')) {
  if (!plot.querySelector('.scatterlayer path.js-line[d^=M]')) continue;
  for (const trace of plot.data) if (trace.x && trace.x.length) curves[trace.name] = trace.x.length;
}
return curves;
"""


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


@contextmanager
def pages(settings: TrackingSettings) -> Iterator[str]:
    """MLflow's pages on a store, as ``plait ui`` serves them; gives their address."""
    command = ui_command(settings, ["--port", str(free_port())])
    if not command.command:
        yield command.url
        return
    with tempfile.TemporaryFile() as log:
        server = subprocess.Popen(
            command.command, env=os.environ | command.environment, stdout=log, stderr=subprocess.STDOUT
        )
        try:
            until_it_answers(command.url, server)
            yield command.url
        finally:
            server.terminate()
            server.wait(30)


def until_it_answers(url: str, server: subprocess.Popen[bytes]) -> None:
    """Wait for the server's first answer."""
    deadline = time.monotonic() + 2 * SECONDS
    while time.monotonic() < deadline and server.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.2)
    raise RuntimeError(f"no answer from {url}; the server's exit status: {server.poll()}")


HIDE_PATH = """
for (const part of document.querySelectorAll('div, span'))
  if (part.textContent.startsWith('Path: ')) part.style.visibility = 'hidden';
"""
DRAWN_FIGURES = """
const places = [...document.querySelectorAll('[data-figure]')];
const drawn = places.filter((place) => place.dataset.drawn === 'yes' && place.querySelector('.main-svg'));
return document.documentElement.dataset.drawn === undefined ? null
  : {there: places.length, drawn: drawn.map((place) => place.closest('section').id)};
"""


class Browser:
    """Headless Chromium on MLflow's pages.

    Args:
        driver: of Chromium.
        address: of the pages.
    """

    def __init__(self, driver: webdriver.Chrome, address: str) -> None:
        self.driver = driver
        self.address = address
        driver.get(address)
        for key, value in STORED.items():
            driver.execute_script("localStorage.setItem(arguments[0], arguments[1])", key, value)
        driver.get("about:blank")  # they are read as the program is loaded

    def open(self, path: str, *texts: str) -> None:
        """Open a page, ``path`` without the leading ``/#/``, and wait for all the texts on it. The program of
        the pages is loaded where the browser is elsewhere, which takes longer than most pages."""
        if self.driver.current_url.startswith(self.address):
            self._go("nowhere")
            WebDriverWait(self.driver, SECONDS, POLL).until(
                lambda _: not any(text in self.text() for text in texts), "the page before stays"
            )
            self._go(path)
        else:
            self.driver.get(f"{self.address}/#/{path}")
        self.wait_for(*texts)

    def _go(self, path: str) -> None:
        """As a link within the pages does."""
        self.driver.execute_script("location.hash = arguments[0]", f"#/{path}")

    def wait_for(self, *texts: str) -> None:
        """Wait until the page shows all the texts."""
        for text in texts:
            WebDriverWait(self.driver, SECONDS, POLL).until(
                lambda _, text=text: text in self.text(),
                f"{text!r} is not on {self.driver.current_url}",
            )

    def text(self) -> str:
        """All text on the page."""
        return str(self.driver.execute_script("return document.body.innerText"))

    def click(self, css: str) -> None:
        """Click on the first element that matches."""
        self.first(css).click()

    def first(self, css: str) -> WebElement:
        """The first element that matches, once there is one."""
        found: WebElement = WebDriverWait(self.driver, SECONDS, POLL).until(
            lambda driver: driver.find_element(By.CSS_SELECTOR, css), f"nothing matches {css}"
        )
        return found

    def curves(self) -> dict[str, int]:
        """Runs with a curve on the page, and how many points the curve has. Curves that Plotly has been
        given but has not drawn do not count."""
        found: dict[str, int] = self.driver.execute_script(DRAWN_CURVES)
        return found

    def wait_for_curves(self, right: Callable[[dict[str, int]], bool]) -> None:
        """Wait until the curves on the page are right."""
        WebDriverWait(self.driver, SECONDS, POLL).until(
            lambda _: right(self.curves()), f"not the right curves on {self.driver.current_url}"
        )

    def picture(self, path: Path) -> None:
        """Save what is to be seen as PNG, without the buttons that float over it."""
        self.driver.execute_script(
            "const style = document.head.appendChild(document.createElement('style'));"
            "style.textContent = arguments[0]",
            ".modebar, [data-component-id*='assistant.fab'] { display: none !important; }",
        )
        time.sleep(1.0)  # charts come in with a short animation
        if not self.driver.save_screenshot(str(path)):
            raise RuntimeError(f"{path} could not be written")


@contextmanager
def browser(address: str, width: int = 1500, height: int = 950) -> Iterator[Browser]:
    """A browser of its own on MLflow's pages."""
    with chromium(width, height) as driver:
        yield Browser(driver, address)


@contextmanager
def chromium(width: int, height: int) -> Iterator[webdriver.Chrome]:
    """Headless Chromium with an empty profile, which keeps what a page writes to its console."""
    with tempfile.TemporaryDirectory() as profile:
        options = webdriver.ChromeOptions()
        options.binary_location = str(CHROMIUM)
        for option in (*OPTIONS, f"--window-size={width},{height}", f"--user-data-dir={profile}"):
            options.add_argument(option)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        driver = webdriver.Chrome(options=options, service=Service(str(DRIVER)))
        try:
            yield driver
        finally:
            driver.quit()


def drawn_figures(driver: webdriver.Chrome) -> list[str]:
    """The figures of a page of Plait's once it has drawn them all.

    Raises:
        RuntimeError: it did not draw every one.
    """
    found: dict[str, Any] = WebDriverWait(driver, SECONDS, POLL).until(
        lambda _: driver.execute_script(DRAWN_FIGURES), "the page draws no figures"
    )
    if len(found["drawn"]) != found["there"]:
        raise RuntimeError(f"{found['there']} figures on the page, drawn: {found['drawn']}")
    drawn: list[str] = found["drawn"]
    return drawn


def open_report(driver: webdriver.Chrome, page: Path, scheme: str = "light") -> list[str]:
    """Open a report with the network switched off; the figures that it shows.

    Args:
        driver: of Chromium.
        page: the file.
        scheme: "light" or "dark".
    """
    driver.execute_cdp_cmd("Network.enable", {})
    offline = {"offline": True, "latency": 0, "downloadThroughput": 0, "uploadThroughput": 0}
    driver.execute_cdp_cmd("Network.emulateNetworkConditions", offline)
    wanted = {"name": "prefers-color-scheme", "value": scheme}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [wanted]})
    driver.get(page.absolute().as_uri())
    return drawn_figures(driver)


def show_figures(seen: Browser, experiment: str, run_id: str, page: str = "report.html") -> list[str]:
    """A page of figures among the artifacts of the search's run; the figures that it shows."""
    seen.open(f"experiments/{experiment}/runs/{run_id}/artifacts/{page}", page.rsplit("/", 1)[-1])
    seen.driver.switch_to.frame(seen.first("iframe"))
    try:
        return drawn_figures(seen.driver)
    finally:
        seen.driver.switch_to.default_content()


def scroll_to_figures(seen: Browser) -> None:
    """Past the head of the page of figures that is shown, to its learning curves."""
    seen.driver.switch_to.frame(seen.first("iframe"))
    try:
        seen.driver.execute_script("document.querySelector('.js-plotly-plot').scrollIntoView()")
    finally:
        seen.driver.switch_to.default_content()


def whole_page(driver: webdriver.Chrome, path: Path, scale: float = 0.7) -> None:
    """Save the whole page as PNG, what lies below the window too."""
    driver.execute_script(
        "document.head.appendChild(document.createElement('style')).textContent = "
        "'.modebar { display: none !important; }'"
    )
    size = driver.execute_cdp_cmd("Page.getLayoutMetrics", {})["cssContentSize"]
    clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": scale}
    shot = driver.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True, "clip": clip})
    path.write_bytes(base64.b64decode(shot["data"]))


def show_search(seen: Browser, experiment: str, search: str, jobs: Sequence[str], view: str = "") -> None:
    """The table of runs with the search opened, so that its jobs are listed below it."""
    condition = quote(f"tags.`plait.search` = '{search}'")
    seen.open(f"experiments/{experiment}/runs?searchFilter={condition}{view}", search)
    if not all(job in seen.text() for job in jobs):  # the page remembers what was open
        seen.click("[data-component-id$='runnamecellrenderer.tsx_46']")
    seen.wait_for(*jobs)


def show_trials(seen: Browser, address: str, *texts: str) -> None:
    """The trials of a search at the address that ``plait ui`` prints."""
    seen.open(address.partition("/#/")[2], *texts)


def show_curves(seen: Browser, experiment: str, search: str, jobs: Sequence[str], metric: str) -> None:
    """The charts of a metric for all jobs of a search: charts show the runs that are listed."""
    show_search(seen, experiment, search, jobs, "&compareRunsMode=CHART")
    show_charts(seen, metric)


def show_job(seen: Browser, experiment: str, run_id: str, metric: str) -> None:
    """The charts of a metric on one job's page."""
    seen.open(f"experiments/{experiment}/runs/{run_id}/model-metrics", "Add chart")
    show_charts(seen, metric)


def show_charts(seen: Browser, metric: str) -> None:
    """Leave only the charts whose name has ``metric`` in it."""
    seen.first("input[placeholder='Search metric charts']").send_keys(metric)


def show_leaderboard(seen: Browser, experiment: str, run_id: str) -> None:
    """The leaderboard among the artifacts of the search's run."""
    seen.open(
        f"experiments/{experiment}/runs/{run_id}/artifacts/leaderboard.json", "objective", "View as table"
    )


def main() -> None:
    """Take all pictures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--root", type=Path, default=Path("plait-runs"), help="tracking.root")
    parser.add_argument("--uri", help="tracking.uri, where it is not in the root")
    parser.add_argument("--experiment", default="plait", help="tracking.experiment")
    parser.add_argument("--search", help="name of the search; the newest by default")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "images")
    given = parser.parse_args()
    settings = TrackingSettings(uri=given.uri, root=given.root, experiment=given.experiment)
    result = load_search(settings, given.search)
    if result.best is None:
        raise SystemExit(f"search {result.name} has no finished job to show")
    given.out.mkdir(parents=True, exist_ok=True)
    with pages(settings) as address, browser(address) as seen:
        jobs = [f"{result.name}/{item.trial:04d}" for item in result.records][:MOST_JOBS]
        show_curves(seen, result.experiment_id, result.name, jobs, "train/")
        seen.wait_for_curves(lambda curves: len(curves) > 1)
        seen.picture(given.out / "mlflow-curves.png")
        show_figures(seen, result.experiment_id, result.run_id)
        scroll_to_figures(seen)
        seen.driver.execute_script(HIDE_PATH)
        seen.picture(given.out / "mlflow-figures.png")
    take_report(settings, result.name, given.out / "report.png")


def take_report(settings: TrackingSettings, name: str, path: Path) -> None:
    """The page that ``plait report`` makes, as a picture."""
    sweep = read_sweep(settings, name)
    with tempfile.TemporaryDirectory() as folder, chromium(1200, 900) as driver:
        page = Path(folder) / "report.html"
        page.write_text(report(sweep, all_figures(sweep)), encoding="utf-8")
        open_report(driver, page)
        whole_page(driver, path)


if __name__ == "__main__":
    main()
