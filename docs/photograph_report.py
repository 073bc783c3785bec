"""Photographs the report of a run: docs/images/report-light.png, report-dark.png and report-narrow.png.

Usage: PYTHONPATH=. python docs/photograph_report.py RUN_DIR

It needs the extra `browser`, Debian's chromium, and Pillow (which comes with matplotlib).
"""

from __future__ import annotations

import io
import sys
import tempfile
from pathlib import Path

from PIL import Image

from ef_common.report.page import page
from ef_common.report.timeline import snapshot_of
from tests.report.browser import chromium, opened

IMAGES = Path(__file__).parent / "images"
WINDOWS = {"light": (1440, False, 1340), "dark": (1440, True, 1340), "narrow": (390, False, 1500)}
"""Width, whether it is dark, and the height that is shown."""
NUM_COLORS = 256


def main(run_dir: Path) -> None:
    """Make the report, open it, and take the pictures."""
    with tempfile.TemporaryDirectory() as folder, chromium() as browser:
        report = Path(folder) / "report.html"
        snapshot = snapshot_of(run_dir)
        snapshot["run"] = f"elasticflow-runs/{run_dir.name}"
        snapshot["command"] = [Path(word).name for word in snapshot["command"] or ()]
        report.write_text(page(snapshot), encoding="utf-8")
        for name, (width, dark, height) in WINDOWS.items():
            with opened(browser, report.as_uri(), width=width, dark=dark) as shown:
                shown.set_viewport_size({"width": width, "height": height})
                shown.wait_for_timeout(500)
                png = shown.screenshot(clip={"x": 0, "y": 0, "width": width, "height": height})
            picture = Image.open(io.BytesIO(png)).convert("RGB")
            picture.quantize(NUM_COLORS, method=Image.Quantize.MAXCOVERAGE).save(
                IMAGES / f"report-{name}.png", optimize=True
            )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
