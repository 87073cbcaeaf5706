"""A real browser without a screen, for tests of pages: Chromium with its driver."""

import contextlib
import json
import shutil

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
MISSING = "no Chromium with its driver here (apt-get install chromium chromium-driver)"


@contextlib.contextmanager
def chromium(profile, *words):
    """A driver of its own; `words` are more of Chromium's options."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for word in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        f"--user-data-dir={profile}",
        *words,
    ):
        options.add_argument(word)
    options.set_capability(
        "goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"}
    )
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    try:
        yield driver
    finally:
        driver.quit()


def requests(browser):
    """The addresses that were asked for since the last look."""
    for entry in browser.get_log("performance"):
        event = json.loads(entry["message"])["message"]
        if event["method"] == "Network.requestWillBeSent":
            yield event["params"]["request"]["url"]
