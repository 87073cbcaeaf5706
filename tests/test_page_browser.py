"""The page in a real browser without a screen: drawn, hovered, zoomed, sorted, read.

It needs Chromium and its driver (Debian: chromium, chromium-driver); they are skipped
where there is none. Whatever the browser's console has to say fails a test, and so does
any request but the one for the file itself.
"""

import dataclasses
import re
import time

import pytest

from browsing import BROWSER, DRIVER, MISSING, chromium, requests
from page_records import LAYERS, MIB, NASTY, found, large
from report_records import INSPECTION, PLAN
from stowax._records._audit import AuditRecord, Finding
from stowax.report import audit_page, differences_page, inspection_page

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (BROWSER and DRIVER), reason=MISSING),
]


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    profile = tmp_path_factory.mktemp("profile")
    with chromium(profile, "--window-size=1300,1000") as driver:
        yield driver


@pytest.fixture
def visit(browser, tmp_path):
    """Opens an inspection's page; at the end the console and the network are quiet."""

    def visit(inspection, plan=None, *, page=None):
        path = tmp_path / "report.html"
        text = page or inspection_page(inspection, plan)
        path.write_text(text, encoding="utf-8")
        browser.get_log("performance")
        browser.get_log("browser")
        browser.get(path.as_uri())
        wait(browser, "return document.documentElement.dataset.ready === 'yes'")
        return browser

    yield visit
    said = [e for e in browser.get_log("browser") if e["level"] != "INFO"]
    assert said == []
    asked = list(requests(browser))
    own = ("file:///", "data:", "chrome://")  # the last are the browser's own icons
    outside = [url for url in asked if not url.startswith(own)]
    assert len(asked) - len(outside) >= 1  # the log has what was asked for
    assert outside == []


def wait(browser, script, seconds=20):
    """What a script returns, once it is something."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if value := browser.execute_script(script):
            return value
        time.sleep(0.02)
    raise AssertionError(f"never: {script}; {browser.get_log('browser')}")


def shown(browser):
    """The first and the last second that the drawing shows."""
    return browser.execute_script("return window.stowaxStep.range")


def press(browser, *keys):
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.by import By

    browser.execute_script("document.getElementById('step').focus()")
    assert browser.find_element(By.CSS_SELECTOR, "#step:focus")
    chain = ActionChains(browser)
    for key in keys:
        chain.send_keys(key)
    chain.perform()


def reading(browser):
    return browser.execute_script(
        "return document.getElementById('reading').textContent"
    )


def hover(browser, name, x, y):
    """The tip over a place of a drawing, given in its own units."""
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.by import By

    place = browser.execute_script(
        """
        document.getElementById("step").scrollIntoView();
        const view = window.stowaxStep.plots[arguments[0]], frame = view.frame;
        const box = view.el.getBoundingClientRect();
        return [box.left + frame.x_scale.compute(arguments[1]),
                box.top + frame.y_scale.compute(arguments[2])];
        """,
        name,
        x,
        y,
    )
    body = browser.find_element(By.TAG_NAME, "html")
    chain = ActionChains(browser)
    chain.w3c_actions.pointer_action.move_to_location(*map(round, place))
    chain.perform()
    assert body
    return browser.execute_script("return document.getElementById('tip').innerText")


def test_the_pointer_reads_the_place_below_it(visit):
    browser = visit(found(), PLAN)
    # 100 MiB of weights, above them the stack, of which 40 of 80 hold nothing yet.
    tip = hover(browser, "memory-device", 1.6, 50)
    assert "180.0 MiB of device memory" in tip or "230.0 MiB of device memory" in tip
    assert "trip 2 of 4 × forward" in tip
    assert re.search(r"memory at 1\.(59|60|61) s", tip)  # where the pointer is
    assert "jit(step)/layers/weights" in tip
    assert "100.0 MiB" in tip
    assert "/home/me/model.py:10" in tip
    assert "reserved, nothing in it: 40.0 MiB" in hover(
        browser, "memory-device", 1.6, 160
    )
    assert "layer\n400.00 ms, 4 times a step" in hover(browser, "lanes", 1.6, -1)
    assert "waiting: copy-done" in hover(browser, "lanes", 5.2, -1)
    assert "loop 4 × back" in hover(browser, "lanes", 3.9, 0)


def test_keys_move_zoom_and_find_the_peak(visit):
    browser = visit(found(), PLAN)
    assert "240.0 MiB of device memory" in reading(browser)  # it starts at the peak
    press(browser, "\ue011")  # Home
    assert reading(browser).startswith("0.00 s: 100.0 MiB of device memory")
    press(browser, "\ue014", "\ue014")  # → twice, a hundredth of what is shown each
    assert browser.execute_script("return window.stowaxStep.now") == pytest.approx(0.12)
    press(browser, "+", "+")
    low, high = shown(browser)
    assert high - low == pytest.approx(6 / 4)
    press(browser, "p")
    assert "240.0 MiB of device memory" in reading(browser)
    low, high = shown(browser)
    assert low <= browser.execute_script("return window.stowaxStep.now") <= high
    press(browser, "0")
    assert shown(browser) == [0, 6]


def test_the_tab_key_reaches_everything_and_shows_where_it_is(visit):
    from selenium.webdriver.common.action_chains import ActionChains

    browser = visit(found(), PLAN)
    reached, styles = [], []
    for _ in range(40):
        ActionChains(browser).send_keys("\ue004").perform()
        where, style = browser.execute_script(
            "const e = document.activeElement, t = e.closest('table');"
            "return [e.id || e.dataset.do || (t ? t.id : e.getAttribute('aria-label')),"
            "getComputedStyle(e).outlineStyle]"
        )
        reached += [where] if reached[-1:] != [where] else []
        styles.append(style)
    assert reached[:5] == ["in", "out", "all", "peak", "step"]
    assert "Largest places here" in reached
    assert "transfers" in reached
    assert set(styles) <= {"solid", "none"}
    assert styles[:5] == ["solid"] * 5


def test_a_drag_zooms_and_the_buttons_bring_the_step_back(visit):
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.by import By

    browser = visit(found())
    hover(browser, "memory-device", 1.0, 150)
    ActionChains(browser).click_and_hold().perform()
    hover(browser, "memory-device", 3.0, 150)
    ActionChains(browser).release().perform()
    wait(browser, "return window.stowaxStep.range[1] < 5")
    low, high = shown(browser)
    assert (low, high) == pytest.approx((1.0, 3.0), abs=0.05)
    browser.find_element(By.CSS_SELECTOR, "[data-do=all]").click()
    assert shown(browser) == [0, 6]


def test_tables_sort_by_keyboard(visit):
    from selenium.webdriver.common.by import By

    browser = visit(found())
    head = browser.find_elements(By.CSS_SELECTOR, "#transfers th")[1]
    button = head.find_element(By.TAG_NAME, "button")
    column = "return Array.from(document.querySelectorAll('#transfers tbody tr'), "
    column += "row => row.cells[1].textContent)"
    assert button.text.startswith("bytes a step")
    button.send_keys("\ue007")  # Enter: the largest first
    assert head.get_attribute("aria-sort") == "descending"
    assert browser.execute_script(column) == ["4.84 GiB", "4.84 GiB", "8.00 MiB"]
    button.send_keys(" ")
    assert head.get_attribute("aria-sort") == "ascending"
    assert browser.execute_script(column)[0] == "8.00 MiB"


def test_an_audit_has_a_page_of_its_own(visit):
    from selenium.webdriver.common.by import By

    made = [
        Finding(
            kind="host-read",
            file=f"{NASTY}/train.py",
            line=line,
            count=1,
            bytes=8 * line,
            seconds=1e-3,
            what=NASTY,
            remedy="Read it late.",
        )
        for line in (3, 7, 5)
    ]
    browser = visit(None, page=audit_page(AuditRecord(findings=tuple(made), steps=20)))
    column = "return Array.from(document.querySelectorAll('#audit tbody tr'), "
    column += "row => row.cells[4].textContent)"
    heads = browser.find_elements(By.CSS_SELECTOR, "#audit th button")
    heads[4].send_keys("\ue007")
    assert browser.execute_script(column) == ["56 B", "40 B", "24 B"]
    assert NASTY in browser.find_element(By.ID, "audit").text


def test_names_from_the_program_stay_text(visit):
    browser = visit(found(NASTY), PLAN)
    assert NASTY in hover(browser, "memory-device", 0.2, 50)
    assert NASTY in hover(browser, "lanes", 0.5, -1)
    assert browser.title == "jit_train_step on v5p-8"
    assert browser.execute_script("return document.images.length") == 0


def test_the_drawing_follows_light_and_dark(visit):
    browser = visit(found(), PLAN)
    ink = "return window.stowaxStep.plots.lanes.model.below[0].major_label_text_color"
    assert browser.execute_script(ink) == "#1b1b1b"
    dark = [{"name": "prefers-color-scheme", "value": "dark"}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": dark})
    assert wait(browser, f"{ink} === '#ececec'")
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def names_in(browser, kind):
    """The names that stand in the bands of a memory: text, and where."""
    source = f"window.stowaxStep.doc.get_model_by_name('memory-{kind}-names')"
    x, y, text = browser.execute_script(
        f"const d = {source}.data; return [d.x, d.y, d.text].map(c => Array.from(c))"
    )
    return dict(zip(text, zip(x, y, strict=True), strict=True))


def test_a_band_has_its_name_where_it_is_tall_enough(visit):
    browser = visit(found(), PLAN)
    names = names_in(browser, "device")
    assert set(names) >= {"parameter", "kept activation"}
    x, y = names["parameter"]
    assert 0 < x < 6
    assert y == pytest.approx(50, abs=1)  # the middle of 100 MiB
    # In the stack, where it holds most, and beside the peak's own figure.
    x, y = names["kept activation"]
    assert 100 < y < 180
    # A zoom moves it to what is shown.
    browser.execute_script("window.stowaxStep.show(0, .5); window.stowaxStep.redraw()")
    assert set(names_in(browser, "device")) == {"parameter"}
    assert names_in(browser, "device")["parameter"][0] < 0.5


def test_the_ten_second_answer_is_on_the_first_screen(visit):
    browser = visit(dataclasses.replace(found(), capacity_bytes=2**40), PLAN)
    size = {"width": 1280, "height": 800, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    below = "return Array.from(document.querySelectorAll(arguments[0]), e => "
    below += "e.getBoundingClientRect().bottom)"
    try:
        browser.execute_script("scrollTo(0, 0)")
        for part in (".verdict", ".card", ".legend"):
            bottoms = browser.execute_script(below, part)
            assert bottoms
            assert max(bottoms) < 420
        plots = "return Object.values(window.stowaxStep.plots).map(v => "
        plots += "v.el.getBoundingClientRect().bottom)"
        assert max(browser.execute_script(plots)) < 800
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_no_table_scrolls_sideways_on_a_laptop(visit):
    """Not the ledger of copies either, with names as long as XLA's and a user's are."""
    copies = [
        dataclasses.replace(
            copy,
            start="copy-start.123.remat.clone",
            done="copy-done.123.remat.clone",
            serves="kept activation gelu of layers 3 to 12",
            source="/home/me/project/model_definition.py:1234",
            op_name="jit(step)/transpose(jvp())/while/body/stowax.fetch.3f0c.12/copy",
        )
        for copy in INSPECTION.transfers
    ]
    browser = visit(dataclasses.replace(found(), transfers=tuple(copies)), PLAN)
    size = {"width": 1280, "height": 800, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    wide = "return Array.from(document.querySelectorAll('.scroll')).filter("
    wide += "e => e.scrollWidth > e.clientWidth).map(e => e.ariaLabel)"
    try:
        assert browser.execute_script("return document.querySelector('#transfers')")
        assert browser.execute_script(wide) == []
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_overflows_a_narrow_screen(visit, scheme):
    browser = visit(dataclasses.replace(found(), hazards=INSPECTION.hazards), PLAN)
    size = {"width": 420, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    feature = {"name": "prefers-color-scheme", "value": scheme}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        fits = (
            "const e = document.documentElement; return e.scrollWidth <= e.clientWidth"
        )
        assert wait(browser, fits)
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_a_hundred_thousand_places_are_drawn_as_wide_as_the_screen(visit):
    browser = visit(large(100_000))
    step = "window.stowaxStep"
    pixels = browser.execute_script(f"return {step}.pixels")
    assert 0 < browser.execute_script(f"return {step}.drawn.device") <= pixels + 1
    bars = f"return {step}.doc.get_model_by_name('busy-source').data.left.length"
    assert 0 < browser.execute_script(bars) <= 2 * pixels
    # Zoomed in, every moment is there.
    browser.execute_script(f"{step}.show(1, 1.03); {step}.redraw()")
    assert browser.execute_script(f"return {step}.drawn.device") == pytest.approx(
        100, abs=2
    )
    assert "jit(step)/layers/" in hover(browser, "memory-device", 1.01, 1)


def test_two_inspections_are_drawn_together(visit):
    page = differences_page(found(), found(NASTY), ("plain", NASTY))
    browser = visit(None, page=page)
    lines = "return Bokeh.documents[0].get_model_by_name('over-time-figure')"
    lines += ".renderers.filter(r => r.glyph.type === 'Step').length"
    assert browser.execute_script(lines) == 2
    assert browser.execute_script("return Bokeh.documents.length") == 2
    assert browser.execute_script("return document.images.length") == 0


def test_the_budget_curve_shows_what_is_near_and_everything(visit):
    from selenium.webdriver.common.by import By

    browser = visit(found(), PLAN)
    end = "return Bokeh.documents.map(d => d.get_model_by_name('budget-x'))"
    end += ".find(Boolean).end"
    near = browser.execute_script(end)
    assert 64 < near < 142  # GiB: the budget, and what keeping everything needs
    button = browser.find_element(By.CSS_SELECTOR, '[data-near=""]')
    button.send_keys("\ue007")
    assert browser.execute_script(end) > 142
    browser.find_element(By.CSS_SELECTOR, '[data-near="yes"]').send_keys(" ")
    assert browser.execute_script(end) == near


def test_the_totals_are_the_records(visit):
    browser = visit(found())
    total = browser.execute_script("return window.stowaxStep.data.curves.device.total")
    moments = found().memory_timeline.device.moments
    sums = list(total.values()) if isinstance(total, dict) else list(total)
    assert sums == [moment.total for moment in moments]
    assert max(sums) == 240 * MIB
    assert len(moments) == 2 + 4 * LAYERS
