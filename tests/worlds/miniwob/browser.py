"""browser: a headless chromium, driven by Selenium; whatever becomes of this process, none of its processes and files stays behind.

It runs in a virtual environment of its own (`requirements.txt`), and knows nothing of Troupe.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from typing import Any

PROGRAMS = {"chromium": "chromium", "chromedriver": "chromium-driver"}
"""Each program with the Debian package that installs it."""
FLAGS = (
    "--headless",
    "--no-sandbox",  # as MiniWoB++ starts it: it does not run as root otherwise, and opens pages of the package only
    "--no-zygote",
    "--in-process-gpu",
    "--renderer-process-limit=1",
    "--disable-dev-shm-usage",  # containers have 64 MiB of it
    "--disable-background-networking",
    "--host-resolver-rules=MAP * ~NOTFOUND",
)
GUARD = 'read -r processes; cat >/dev/null; kill -KILL $processes; sleep 1; rm -rf -- "$0"'
"""Waits for the end of its standard input, which the death of this process closes, too."""
LOAD_S, SCRIPT_S = 20, 10
"""Seconds for a page to load, and for a script in it."""


class BrowserFailed(Exception):
    """Raised where the browser is gone or does not answer, which is no fault of whoever acts in it."""

    is_infrastructure = True


class Browser:
    """One chromium with one tab. It keeps its files in a folder of its own."""

    def __init__(self) -> None:
        """Starts it, which takes seconds.

        Raises FileNotFoundError where a program is missing, and BrowserFailed where it does not start.
        """
        paths = {name: shutil.which(name) for name in PROGRAMS}
        if missing := [package for name, package in PROGRAMS.items() if paths[name] is None]:
            raise FileNotFoundError(f"no browser: install the Debian packages {', '.join(missing)}")
        self._folder = tempfile.mkdtemp(prefix="troupe-miniwob-")
        self._guard = subprocess.Popen(
            ["sh", "-c", GUARD, self._folder], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
        )
        self._driver: Any = None
        self.is_open = True
        self.user: object | None = None
        """The page that has it now."""
        self._driver = self._ask(_start, paths["chromium"], paths["chromedriver"], self._folder)
        # All other processes end with these two.
        driver, browser = self._driver.service.process.pid, self._driver.capabilities["goog:processID"]
        assert self._guard.stdin is not None
        self._guard.stdin.write(f"{driver} {browser}\n".encode())
        self._guard.stdin.flush()

    def open(self, url: str) -> None:
        """Loads a page anew. Raises BrowserFailed."""
        self._ask(lambda: self._driver.get(url))

    def run(self, script: str, *arguments: Any) -> Any:
        """Returns what a script in the page returns. Raises what the script raises, and BrowserFailed."""
        return self._ask(lambda: self._driver.execute_script(script, *arguments))

    def press(self, keys: str) -> None:
        """Presses the keys of printable characters, one after the other. Raises BrowserFailed."""
        from selenium.webdriver.common.action_chains import ActionChains

        self._ask(lambda: ActionChains(self._driver, duration=0).send_keys(keys).perform())

    def end(self) -> None:
        """Kills it and removes its files, which takes a second."""
        self.is_open = False
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        if self._driver is not None:
            self._driver.service.process.wait()
        self._guard.wait()

    def _ask(self, what: Any, *arguments: Any) -> Any:
        """Returns what a call of Selenium's returns; a browser that does not answer is ended."""
        from selenium.common.exceptions import JavascriptException, WebDriverException
        from urllib3.exceptions import HTTPError

        try:
            return what(*arguments)
        except JavascriptException:
            raise
        except (WebDriverException, HTTPError, OSError) as error:
            self.end()
            raise BrowserFailed(f"the browser does not answer: {str(error).splitlines()[0]}") from error


_browsers: list[Browser] = []
"""The one of this process, once there is one."""


def browser_for(user: object) -> Browser:
    """Returns the browser of this process, a new one where there is none yet or it has ended.

    Raises RuntimeError while somebody else has it, and what `Browser` raises.
    """
    if not _browsers or not _browsers[0].is_open:
        _browsers[:] = [Browser()]
    (browser,) = _browsers
    if browser.user is not None:
        raise RuntimeError("this worker has another page open: declare Environment(..., is_isolated=True)")
    browser.user = user
    return browser


def _start(chromium: str, chromedriver: str, folder: str) -> Any:
    from selenium.webdriver import Chrome, ChromeOptions
    from selenium.webdriver.chrome.service import Service

    options = ChromeOptions()
    options.binary_location = chromium
    options.unhandled_prompt_behavior = "accept"
    for flag in FLAGS:
        options.add_argument(flag)
    places = dict.fromkeys(("TMPDIR", "XDG_CONFIG_HOME", "XDG_CACHE_HOME"), folder)
    driver = Chrome(options, Service(chromedriver, env=os.environ | places))
    driver.set_page_load_timeout(LOAD_S)
    driver.set_script_timeout(SCRIPT_S)
    return driver
