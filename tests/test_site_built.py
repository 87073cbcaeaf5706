"""The built site asks nobody but itself for anything; it is there after `make docs`."""

import functools
import http.server
import pathlib
import re
import threading
import time

import pytest

from browsing import BROWSER, DRIVER, MISSING, chromium, requests

SITE = pathlib.Path(__file__).parents[1] / "build" / "site"

pytestmark = pytest.mark.skipif(
    not (SITE / "index.html").exists(), reason="no build/site here (make docs)"
)

# What a page loads by itself: not what it links to.
LOADED = re.compile(
    r"<(?:script|img|iframe|source)[^>]*\ssrc=[\"']?(?:https?:)?//[^\"'> ]+"
    r"|<link(?![^>]*rel=[\"']?canonical)[^>]*\shref=[\"']?(?:https?:)?//[^\"'> ]+"
    r"|url\([\"']?(?:https?:)?//[^)]+|@import[^;]*//[^;]+"
)


def test_no_page_or_style_loads_anything_from_elsewhere():
    files = [*SITE.rglob("*.html"), *SITE.rglob("*.css")]
    assert len(files) > 50
    outside = {
        path.relative_to(SITE).as_posix(): found
        for path in files
        if (found := LOADED.findall(path.read_text()))
    }
    assert outside == {}


def test_every_kind_of_page_is_there():
    for name in (
        "howto/does-not-fit.html",
        "machines/gpu.html",
        "api/plan.html",
        "tutorial/1-memory-kinds.ipynb",
        "howto/gallery/gpt-h200.html",
        "changelog.html",
        "examples/integrations/nnx_lm.py",
        "results/chart-audit.svg",
    ):
        assert (SITE / name).stat().st_size > 1000, name
    assert "Your JAX training step runs out" in (SITE / "index.html").read_text()


@pytest.fixture
def address():
    """Where the site is served, on this machine alone."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    handler = functools.partial(Quiet, directory=SITE)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


@pytest.fixture
def browser(tmp_path):
    with chromium(tmp_path) as driver:
        yield driver


@pytest.mark.slow
@pytest.mark.skipif(not (BROWSER and DRIVER), reason=MISSING)
def test_pages_and_search_work_without_network(browser, address):
    browser.get("about:blank")
    list(requests(browser))
    size = {"width": 420, "height": 900, "deviceScaleFactor": 1, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    for name in ("index", "howto/does-not-fit", "api/plan", "results/comparison"):
        browser.get(f"{address}{name}.html")
        wide = "return document.documentElement.scrollWidth"
        assert browser.execute_script(wide) <= 420, name
    browser.get(f"{address}index.html?q=host_reserve")
    result = "return document.querySelectorAll('.md-search-result__link').length"
    until = time.monotonic() + 60
    while not browser.execute_script(result) and time.monotonic() < until:
        time.sleep(0.1)
    assert browser.execute_script(result) > 0
    said = [entry for entry in browser.get_log("browser") if entry["level"] != "INFO"]
    assert said == []
    asked = list(requests(browser))
    assert any(url.endswith("search_index.json") for url in asked)
    assert [u for u in asked if not u.startswith((address, "data:", "blob:"))] == []
