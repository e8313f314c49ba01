"""The page in a real browser: it is drawn, hovering, clicking and keys answer, in the dark and on a phone."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from lowtide.ir.schedule import Compute, straight
from lowtide.report.content.contents import Contents, of_ops
from lowtide.report.content.curve import Curve
from lowtide.report.page import page
from lowtide.solvers import solve
from lowtide.solvers.frontier import frontier
from tests.helpers.handmade import solved
from tests.helpers.reported import EVIL, tower
from tests.helpers.slices import in_slices, two_layers

FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --window-size=1400,1000"
)
FIGURES = ("timeline", "strip", "frontier", "arena")
REMINDED_SECONDS = 5
PATIENCE = 600  # seconds; only a page that never gets there waits them out


def needed(program: str) -> str:
    found = shutil.which(program)
    if found is None:
        if os.environ.get("CI_BROWSER") == "1":
            pytest.fail(f"{program} is not installed, and CI_BROWSER=1 says that it must be")
        pytest.skip(f"{program} is not installed")
    return found


@dataclass
class Shown:
    """A page in a browser, and what it was made from."""

    driver: Any
    contents: Contents
    address: str

    def open(self) -> None:
        self.driver.get(self.address)
        self.wait(lambda: self.js("return window.lowtideReady > 0"))

    def js(self, code: str) -> Any:
        return self.driver.execute_script(code)

    def id(self, name: str) -> Any:
        return self.driver.find_element(By.ID, name)

    def wait(self, true: Callable[[], Any], again: Callable[[], None] | None = None) -> None:
        """Until it is so. A browser that is busy may miss a pointer: it is moved, or pressed, `again`."""
        begun = since = time.monotonic()
        while not true():
            assert time.monotonic() - begun < PATIENCE, "it does not happen"
            time.sleep(0.05)
            if again is not None and time.monotonic() - since > REMINDED_SECONDS:
                again()
                since = time.monotonic()

    @property
    def chosen(self) -> tuple[int, int]:
        curve, moment = self.js("return [lowtide.state.curve, lowtide.state.moment]")
        return curve, moment

    def point_at(self, moment: int, axis: str = "2", click: bool = False) -> None:
        """Move the pointer over a moment of a curve, and press."""
        x, y = self.js(
            "const f = document.getElementById('timeline')._fullLayout;"
            f"const x = f.xaxis{axis}, y = f.yaxis{axis};"
            f"return [x._offset + x.d2p({moment} + 0.5), y._offset + y._length / 2];"
        )
        figure = self.id("timeline")
        self.js("document.getElementById('timeline').scrollIntoView({block: 'center'})")
        left, top = x - figure.size["width"] / 2, y - figure.size["height"] / 2
        chain = ActionChains(self.driver, duration=20).move_to_element_with_offset(figure, left - 3, top)
        chain.move_by_offset(3, 0).perform()
        if click:
            hovers = "return document.querySelectorAll('#timeline .hovertext').length"
            self.wait(lambda: self.js(hovers), again=lambda: self.point_at(moment, axis))
            ActionChains(self.driver).click().perform()


@pytest.fixture(scope="module")
def contents() -> Contents:
    graph = tower(20, evil=True)
    found = frontier(graph, 4)
    return of_ops(solve(graph, "auto", found[-1].peak_bytes), frontier=found)


@pytest.fixture(scope="module")
def browser(contents: Contents, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shown]:
    options = webdriver.ChromeOptions()
    options.binary_location = needed("chromium")
    for flag in FLAGS.split():
        options.add_argument(flag)
    options.add_argument(f"--user-data-dir={tmp_path_factory.mktemp('profile')}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    file: Path = tmp_path_factory.mktemp("page") / "report.html"
    file.write_text(page(contents), encoding="utf-8")
    driver = webdriver.Chrome(options=options, service=Service(needed("chromedriver")))
    try:
        yield Shown(driver, contents, file.as_uri())
    finally:
        driver.quit()


@pytest.fixture
def shown(browser: Shown) -> Iterator[Shown]:
    """The page, opened anew; nothing in it may go wrong."""
    browser.open()
    yield browser
    wrong = [entry for entry in browser.driver.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]
    assert not wrong


def by_module(curve: Curve, moment: int) -> dict[str, int]:
    """Bytes at a moment by module, as Python adds them up."""
    step = curve.moments[moment]
    found: dict[str, int] = {}
    for life in curve.lives:
        if life.first <= step < life.stop:
            module = curve.graph.values[life.value].module
            found[module] = found.get(module, 0) + life.bytes
    compute = curve.schedule.steps[step]
    assert isinstance(compute, Compute)
    op = curve.graph.ops[compute.op]
    found[op.module] = found.get(op.module, 0) + op.workspace_bytes
    return {module: count for module, count in found.items() if count}


def listed(shown: Shown) -> dict[str, int]:
    """What the page lists, with the modules that are folded away at first."""
    shown.js("document.querySelectorAll('#moment-modules > details').forEach((row) => (row.open = true))")
    shown.wait(
        lambda: shown.js("return [...document.querySelectorAll('#moment-modules > details')]"
                         ".every((row) => row.children.length > 1)")
    )  # fmt: skip
    rows = shown.js(
        "return [...document.querySelectorAll('#moment-modules details')]"
        ".filter((row) => !row.querySelector('details'))"
        ".map((row) => [row.querySelector('summary span:nth-child(2)').textContent, +row.dataset.bytes])"
    )
    return {name.replace("(outside of any module)", ""): count for name, count in rows}


def test_every_figure_is_drawn_and_the_curves_are_the_referees(shown: Shown) -> None:
    for figure in FIGURES:
        assert shown.js(f"return document.querySelectorAll('#{figure} .main-svg path').length") > 0, figure
    totals = shown.js("return lowtide.curves.map((curve) => [...curve.total])")
    for curve, found in zip((shown.contents.plain, shown.contents.planned), totals, strict=True):
        assert found == curve.stack.sum(axis=1).tolist()
    assert shown.js("return document.title").startswith(EVIL)
    assert shown.chosen == (1, shown.contents.planned.peak_moment)


def test_hovering_says_what_runs_and_what_is_held(shown: Shown) -> None:
    shown.point_at(30)
    hovers = "return document.querySelectorAll('#timeline .hovertext').length"
    shown.wait(lambda: shown.js(hovers), again=lambda: shown.point_at(30))
    text = shown.js("return document.querySelector('#timeline .hovertext').textContent")
    assert "held at op 30" in text
    assert shown.js("return lowtide.curves[1].label(30)") in text


@pytest.mark.parametrize(("curve", "axis", "moment"), [(0, "", 1), (0, "", 33), (1, "2", 40)])
def test_a_click_lists_what_is_alive_there_by_module(
    shown: Shown, curve: int, axis: str, moment: int
) -> None:
    press = partial(shown.point_at, moment, axis, click=True)
    press()
    shown.wait(lambda: shown.chosen == (curve, moment), again=press)
    drawn = (shown.contents.plain, shown.contents.planned)[curve]
    found = listed(shown)
    assert found == by_module(drawn, moment)
    assert sum(found.values()) == drawn.stack[moment].sum()
    assert f"op {moment} of {len(drawn.moments)}" in shown.id("moment-title").text


def test_keys_move_the_moment_and_find_the_peak(shown: Shown) -> None:
    planned, plain = shown.contents.planned, shown.contents.plain
    timeline = shown.id("timeline")
    timeline.send_keys(Keys.HOME)
    assert shown.chosen == (1, 0)
    timeline.send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.ARROW_LEFT)
    assert shown.chosen == (1, 1)
    timeline.send_keys(Keys.SHIFT, Keys.ARROW_RIGHT)
    assert shown.chosen == (1, 11)
    assert timeline.get_attribute("aria-valuenow") == "11"
    axis = "const x = document.getElementById('timeline')._fullLayout.xaxis2; return x._offset + x.d2p(11.5)"
    assert shown.id("timeline-cursor").get_attribute("style").startswith(f"left: {shown.js(axis):.2f}"[:10])
    assert "op 11 of" in timeline.get_attribute("aria-valuetext")
    timeline.send_keys(Keys.ENTER)
    assert shown.chosen == (1, planned.peak_moment)
    timeline.send_keys(Keys.ARROW_UP, "p")
    assert shown.chosen == (0, plain.peak_moment)
    timeline.send_keys(Keys.END)
    assert shown.chosen == (0, len(plain.moments) - 1)


def test_the_tab_key_reaches_the_controls_and_the_timeline_and_focus_can_be_seen(shown: Shown) -> None:
    reached = []
    for _ in range(14):
        shown.driver.switch_to.active_element.send_keys(Keys.TAB)
        reached.append(
            shown.js("const e = document.activeElement; return e.id || e.dataset.do || e.dataset.curve")
        )
        if reached[-1] == "timeline":
            break
    assert reached[0] == "theme"
    assert {"previous", "next", "peak", "in", "out", "all", "timeline"} <= set(reached)
    assert shown.js("return getComputedStyle(document.activeElement).outlineStyle") == "solid"


def test_zooming_keeps_both_curves_together_and_draws_every_op(shown: Shown) -> None:
    timeline = shown.id("timeline")
    timeline.send_keys("+", "+")
    ranges = (
        "const f = document.getElementById('timeline')._fullLayout; return [f.xaxis.range, f.xaxis2.range]"
    )
    shown.wait(lambda: shown.js("return lowtide.state.range !== null"))
    above, below = shown.js(ranges)
    assert above == below
    assert above[1] - above[0] < len(shown.contents.planned.moments) / 2
    timeline.send_keys("0")
    shown.wait(lambda: shown.js("return lowtide.state.range === null"))


def test_the_axis_can_be_time(shown: Shown) -> None:
    shown.driver.find_element(By.CSS_SELECTOR, "[data-axis=time]").click()
    end = shown.js("return document.getElementById('timeline')._fullLayout.xaxis2.range[1]")
    assert end == pytest.approx(1e3 * sum(op.seconds for op in shown.contents.planned.ops))
    assert shown.js("return document.getElementById('timeline')._fullLayout.xaxis2.title.text").endswith(
        "(ms)"
    )


def brightness(colour: str) -> float:
    return sum(map(int, colour.removeprefix("rgb(").removesuffix(")").split(","))) / 3


def test_dark_mode_follows_the_system_and_the_button(shown: Shown) -> None:
    paper = "return getComputedStyle(document.body).backgroundColor"
    figure = "return document.getElementById('timeline')._fullLayout.paper_bgcolor"
    assert brightness(shown.js(paper)) > 200
    dark = {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    shown.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", dark)
    try:
        shown.wait(lambda: brightness(shown.js(paper)) < 60)
        shown.wait(lambda: shown.js(figure) == "#12181e")
        shown.id("theme").click()
        assert brightness(shown.js(paper)) > 200
        shown.wait(lambda: shown.js(figure) == "#ffffff")
    finally:
        shown.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_on_a_phone_nothing_sticks_out(browser: Shown) -> None:
    metrics = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
    browser.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    try:
        browser.open()
        assert browser.js("return document.documentElement.scrollWidth") == 390
        for figure in FIGURES:
            width = browser.js(
                f"return document.querySelector('#{figure} .main-svg').getBoundingClientRect().width"
            )
            assert 0 < width <= 390, figure
    finally:
        browser.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_what_runs_in_slices_has_a_band_with_its_name(browser: Shown, tmp_path: Path) -> None:
    graph = in_slices(two_layers())
    file = tmp_path / "slices.html"
    file.write_text(page(of_ops(solved(graph, straight(graph)))), encoding="utf-8")
    there = Shown(browser.driver, browser.contents, file.as_uri())
    there.open()
    assert there.js("return lowtide.state.axis") == "time"  # many ops are in the place of one
    bands, names = there.js(
        "const { shapes, annotations } = document.getElementById('timeline').layout;"
        "return [shapes.filter(({ type }) => type === 'rect').map(({ xref, x0, x1 }) => [xref, x0, x1]),"
        "annotations.map(({ text }) => text)]"
    )
    assert bands == [["x2", 0, 3000], ["x2", 3000, 6000], ["x2", 8000, 12000], ["x2", 12000, 16000]]
    assert names.count("layers.0: 8 in 4 slices") == names.count("layers.1: 8 in 4 slices") == 2
    assert "runs in slices" in there.id("legend").text
    assert "layers.0: 8 in 4 slices" in there.id("moment-title").text  # the peak is in it
    browser.open()
    assert "runs in slices" not in browser.id("legend").text


def test_the_arena_answers_too(shown: Shown) -> None:
    x, y = shown.js(
        "const f = document.getElementById('arena')._fullLayout;"
        "return [f.xaxis._offset + f.xaxis.d2p(25.5), f.yaxis._offset + f.yaxis.d2p(0) - 2]"
    )
    figure = shown.id("arena")
    shown.js("document.getElementById('arena').scrollIntoView({block: 'center'})")
    left, top = x - figure.size["width"] / 2, y - figure.size["height"] / 2
    ActionChains(shown.driver, duration=20).move_to_element_with_offset(figure, left, top).click().perform()
    assert shown.id("arena-readout").text.startswith("op 25: ")
    assert shown.chosen == (1, 25)
