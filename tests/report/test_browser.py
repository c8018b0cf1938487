"""The page in a real browser shows every run in its colour, on a light and a dark ground, and asks for nothing."""

import os
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from megagate.report import style
from megagate.report.command import PAGE, main
from tests.report.runs import write_whole

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
OF_ITS_OWN = (".google.com", ".googleapis.com", ".gvt1.com")
"""Where Chromium turns to by itself: updates, the time, accounts."""
CONTROL = '<img src="http://image.test/x.png"><link rel="stylesheet" href="http://style.test/x.css">'
pytestmark = pytest.mark.timeout(500)  # three starts of a browser, on a machine that does other things too


@pytest.fixture(scope="module")
def browser() -> str:
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        reason = f"none of {', '.join(BROWSERS)} is installed (on Debian: apt-get install chromium)"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    return found


@pytest.fixture
def proxy() -> Iterator[tuple[int, list[str]]]:
    """The port of a proxy that refuses all that it is asked for, and the hosts that it was asked for."""
    server, hosts = socket.create_server(("127.0.0.1", 0)), []

    def serve() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            with connection:
                connection.settimeout(5)
                words = connection.recv(4096).decode("latin-1").split(" ")
                hosts.append(words[1].removeprefix("http://").partition("/")[0].partition(":")[0])
                connection.sendall(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")

    threading.Thread(target=serve, daemon=True).start()
    yield server.getsockname()[1], hosts
    server.close()


def show(browser: str, page: Path, picture: Path, port: int, *words: str) -> tuple[np.ndarray, str]:
    """Take a screenshot; returns its pixels [height, width, 3] in 0..255 and what the browser said."""
    from matplotlib import image

    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"]
    command += ["--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"]
    command += [f"--user-data-dir={picture.with_suffix('.profile')}", "--enable-logging=stderr"]
    command += [f"--proxy-server=http://127.0.0.1:{port}", "--proxy-bypass-list=<-loopback>"]
    command += ["--window-size=1200,4000", f"--screenshot={picture}", *words, page.as_uri()]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert picture.is_file(), finished.stderr
    return (image.imread(picture)[..., :3] * 255).round().astype(int), finished.stderr


def share_of(pixels: np.ndarray, colour: str) -> float:
    wanted = [int(colour[start : start + 2], 16) for start in (1, 3, 5)]
    return float((np.abs(pixels - wanted).max(axis=-1) <= 3).mean())


def test_it_shows_every_run_and_asks_for_nothing(browser: str, proxy: tuple[int, list[str]], tmp_path: Path) -> None:
    port, hosts = proxy
    control = tmp_path / "control.html"
    control.write_text(CONTROL, encoding="utf-8")
    show(browser, control, tmp_path / "control.png", port)
    assert {"image.test", "style.test"} <= set(hosts)
    hosts.clear()

    names = ("baseline", "headwise", "elementwise")
    for seed, name in enumerate(names):
        write_whole(tmp_path / name, seed, is_gated=seed > 0, iterations=60)
    assert main([*(str(tmp_path / name) for name in names), "--output", str(tmp_path / "report")]) == 0
    page = tmp_path / "report" / PAGE
    light, said = show(browser, page, tmp_path / "light.png", port)
    dark, _ = show(browser, page, tmp_path / "dark.png", port, "--blink-settings=preferredColorScheme=0")
    for pixels, ground in ((light, "#ffffff"), (dark, "#15181c")):
        assert pixels.shape == (4000, 1200, 3)
        assert 0.5 < share_of(pixels, ground) < 0.97
        for index, name in enumerate(names):
            assert share_of(pixels, style.COLOURS[index]) > 1e-4, name
        strips = np.array_split(pixels, 20)
        assert sum(strip.std() > 1 for strip in strips) >= 18, "figures and text from top to bottom"
    assert [host for host in hosts if not host.endswith(OF_ITS_OWN)] == []
    assert "Content Security Policy" not in said
