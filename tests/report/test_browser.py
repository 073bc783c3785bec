"""The page in a real browser, of real and of very large runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

from ef_common.cli import main
from ef_common.protocol.auth import Token
from ef_common.testing.harness import Job
from tests.report.browser import NEEDS_BROWSER, chromium, opened, wait_until
from tests.report.generated import large, small
from tests.report.test_page import hostile
from tests.waiting import STOP, join_and_loss

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = [*NEEDS_BROWSER, pytest.mark.timeout(240)]

MAX_BYTES = 5_000_000


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


def report_of(run_dir: Path, *options: str) -> str:
    result = CliRunner().invoke(main, ["report", str(run_dir), *options])
    assert result.exit_code == 0, result.output
    return (run_dir / "report.html").as_uri()


def figure(page: Page, name: str) -> str:
    return page.locator(f"#figures dt:text-is('{name}') + dd").inner_text().splitlines()[0]


PIXELS = """([title, name]) => {
    const charts = [...document.querySelectorAll(".chart")];
    const canvas = charts.find((one) => one.getAttribute("aria-label").startsWith(title)).querySelector("canvas");
    const copy = Object.assign(document.createElement("canvas"), { width: canvas.width, height: canvas.height });
    const context = copy.getContext("2d", { willReadFrequently: true });
    context.drawImage(canvas, 0, 0);
    const { data: found } = context.getImageData(0, 0, copy.width, copy.height);
    const [red, green, blue] = color(name).match(/[0-9a-f]{2}/gi).map((digits) => parseInt(digits, 16));
    let number = 0;
    for (let at = 0; at < found.length; at += 4) {
        const distance = Math.abs(found[at] - red) + Math.abs(found[at + 1] - green) + Math.abs(found[at + 2] - blue);
        number += found[at + 3] > 200 && distance < 60;
    }
    return number;
}"""


def pixels(page: Page, chart: str, name: str) -> int:
    """How much of a chart has about this color of the page."""
    return int(page.evaluate(PIXELS, [chart, name]))


def range_of(page: Page) -> list[float]:
    found: list[float] = page.evaluate("charts.all.map(({ plot }) => [plot.scales.x.min, plot.scales.x.max])")[0]
    assert page.evaluate("new Set(charts.all.map(({ plot }) => `${plot.scales.x.min} ${plot.scales.x.max}`)).size") == 1
    return found


def test_report_shows_the_run(tmp_path: Path, browser: Browser) -> None:
    small(tmp_path)
    with opened(browser, report_of(tmp_path)) as page:
        assert figure(page, "Changes survived") == "3"
        assert figure(page, "Workers") == "2"
        assert page.locator("#audit li").count() == 5
        assert page.locator("#changes tbody tr").count() == 4
        assert "was lost (its connection ended)" in page.locator("#changes").inner_text()
        assert page.locator("#checkpoints tbody tr").count() == 2
        assert page.locator("#news tbody tr").count() == 3
        for chart in ("Workers", "Samples", "Loss", "Global batch", "Scale"):
            assert pixels(page, chart, "training") > 500, chart
        for name in ("lost", "joined", "left"):
            assert pixels(page, "Cost", name) > 50, name
        for name in ("warming", "training", "slow", "lost"):
            assert pixels(page, "Processes", name) > 50, name


@pytest.mark.parametrize("width", [390, 800, 1600])
def test_page_fits_into_windows_of_any_width(tmp_path: Path, browser: Browser, width: int) -> None:
    small(tmp_path)
    with opened(browser, report_of(tmp_path), width=width) as page:
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        chart = page.locator(".chart canvas").first.bounding_box()
        assert chart is not None
        assert 0.75 * width < chart["width"] < width
        page.set_viewport_size({"width": 500, "height": 800})
        wait_until(page, "charts.all.every(({ plot }) => plot.width < 500)")


def test_dark_and_light_follow_the_system(tmp_path: Path, browser: Browser) -> None:
    small(tmp_path)
    url = report_of(tmp_path)
    found = []
    for dark in (False, True):
        with opened(browser, url, dark=dark) as page:
            color = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
            found.append(sum(color))
    assert found[0] > 600 > 150 > found[1]


def test_zoom_of_one_chart_is_that_of_all_and_can_be_undone(tmp_path: Path, browser: Browser) -> None:
    small(tmp_path)
    with opened(browser, report_of(tmp_path)) as page:
        whole = range_of(page)
        over = page.locator(".chart .u-over").nth(1)
        box = over.bounding_box()
        assert box is not None
        page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 20)
        page.mouse.down()
        page.mouse.move(box["x"] + box["width"] * 0.75, box["y"] + 20, steps=5)
        page.mouse.up()
        low, high = range_of(page)
        length = whole[1] - whole[0]
        assert low == pytest.approx(whole[0] + 0.5 * length, abs=0.02 * length)
        assert high == pytest.approx(whole[0] + 0.75 * length, abs=0.02 * length)
        page.get_by_role("button", name="Show all of the run").click()
        assert range_of(page) == whole
        page.locator("#changes button.at").first.click()
        assert range_of(page) != whole
        page.locator("#charts").focus()
        page.keyboard.press("0")
        assert range_of(page) == whole
        page.keyboard.press("+")
        assert range_of(page)[1] - range_of(page)[0] == pytest.approx(length / 2)


def test_cursor_tells_values_and_what_a_process_does(tmp_path: Path, browser: Browser) -> None:
    run = small(tmp_path)
    with opened(browser, report_of(tmp_path)) as page:
        page.locator(".chart .u-over").nth(0).hover()
        values = [text for text in page.locator(".chart .value").all_inner_texts() if text]
        assert any("2 workers at" in text or "3 workers at" in text for text in values)
        assert any("samples/s at" in text for text in values)
        lanes = page.locator(".chart .u-over").last
        lanes.hover(position={"x": 400, "y": 24})
        tip = page.locator(".tip").inner_text()
        assert run.members[0] in tip
        assert "process 8000" in tip
        assert "training from" in tip


def test_markup_of_a_run_is_shown_as_text(tmp_path: Path, browser: Browser) -> None:
    hostile(tmp_path)
    with opened(browser, report_of(tmp_path, "--no-audit")) as page:
        assert page.locator("img").count() == 0
        assert "<img src=x onerror=alert(1)>" in page.locator("#news").inner_text()
        assert "<img src=x onerror=alert(1)>" in page.locator("#changes").inner_text()


def test_run_of_which_little_is_known_is_shown(tmp_path: Path, browser: Browser) -> None:
    (tmp_path / "events").mkdir()
    line = '{"v":1,"time":1.5,"worker":"a","kind":"start","pid":1,"host":"h"}\n'
    (tmp_path / "events" / "a.jsonl").write_text(line)
    with opened(browser, report_of(tmp_path)) as page:
        assert figure(page, "Goodput") == "–"
        assert page.get_by_text("No view of workers was recorded.").count() == 1


def test_live_page_shows_what_happens(tmp_path: Path, browser: Browser) -> None:
    serve = pytest.importorskip("ef_common.report.serve", reason="needs the extra `live`")
    run = small(tmp_path)
    server, started = serve.Server(tmp_path, ("127.0.0.1", 0), token=Token("secret")), threading.Event()
    thread = threading.Thread(target=server.run, kwargs={"on_start": started.set})
    thread.start()
    try:
        assert started.wait(60.0)
        with opened(browser, server.url) as page:
            assert page.url.endswith("/")
            wait_until(page, "document.querySelectorAll('#changes tbody tr').length === 4")
            run.train(10)
            run.lose(run.members[-1])
            run.train(10)
            run.write()
            wait_until(page, "document.querySelectorAll('#changes tbody tr').length === 5")
            assert figure(page, "Workers") == "1"
            assert page.locator("#kind").inner_text().lower() == "live"
    finally:
        server.stop()
        thread.join(60.0)


@pytest.mark.slow
@pytest.mark.processes
def test_real_job_with_a_join_and_a_kill(tmp_path: Path, browser: Browser) -> None:
    from tests.faults.hosts import HOSTS

    host = HOSTS["lightning"]
    options: dict[str, Any] = {**host.patient, "stop": STOP, "checkpoints": True}
    with Job(tmp_path, preload=host.preload) as job:
        second, newcomer = join_and_loss(job, host.train, options)
        assert [worker.wait() for worker in (second, newcomer)] == [0, 0]
        (lost,) = {worker.id for worker in job.workers} - {second.id, newcomer.id}
        job.audit()
    with opened(browser, report_of(tmp_path)) as page:
        assert page.locator("#audit .fails").count() == 0
        assert page.locator("#audit .holds").count() >= 4
        changes = page.locator("#changes tbody tr").all_inner_texts()
        assert any("1 → 2" in text or "2 → 3" in text for text in changes)
        assert any(f"worker {lost} was lost" in text for text in changes)
        lanes = page.evaluate("data.lanes.map(({ worker, how }) => [worker, how])")
        assert len(lanes) == 3
        assert [lost, "lost"] in lanes
        assert float(figure(page, "Goodput").removesuffix(" %")) > 0


@pytest.mark.thorough
def test_six_hours_of_256_workers_fit_into_a_small_file(
    tmp_path: Path, browser: Browser, record_property: Callable[[str, object], None]
) -> None:
    run = large(tmp_path)
    report_of(tmp_path, "--no-audit")
    path = tmp_path / "report.html"
    assert path.stat().st_size <= MAX_BYTES
    begin = time.perf_counter()
    with opened(browser, path.as_uri()) as page:
        wait_until(page, "document.querySelectorAll('#changes tbody tr').length > 0")
        page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        record_property("opened_s", time.perf_counter() - begin)
        record_property("bytes", path.stat().st_size)
        assert figure(page, "Workers") == "256"
        assert page.evaluate("data.lanes.length") == 256 + (run.generation - 1) // 2
