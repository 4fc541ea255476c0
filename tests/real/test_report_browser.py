"""The HTML report in a real headless Chromium, driven through its DevTools protocol."""

import asyncio
import base64
import json
import math
import os
import pathlib
import runpy
import shutil
import signal
import subprocess
import time

import aiohttp
import pytest

from north_jax.evals.report import build_report

SYNTHETIC = runpy.run_path(str(pathlib.Path(__file__).parents[1] / "evals" / "test_report.py"))
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine: apt-get install chromium")


@pytest.fixture(scope="module")
def port(tmp_path_factory):
    """The DevTools port of a running browser."""
    profile = tmp_path_factory.mktemp("profile")
    command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
    command += ["--remote-debugging-port=0", f"--user-data-dir={profile}", "about:blank"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        ready, end = profile / "DevToolsActivePort", time.monotonic() + 90
        while not (ready.exists() and ready.read_text().count("\n")):
            assert process.poll() is None, f"{CHROMIUM} ended with code {process.returncode} before it was ready"
            assert time.monotonic() < end, f"{CHROMIUM} opened no DevTools port within 90 s"
            time.sleep(0.1)
        yield int(ready.read_text().splitlines()[0])
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    return build_report(SYNTHETIC["make_workdir"](tmp_path_factory.mktemp("demo")))


class Tab:
    """One page of the browser: calls, JavaScript, and what went wrong or was fetched meanwhile."""

    def __init__(self, socket):
        self.socket, self.sent, self.problems, self.requests, self.loaded = socket, 0, [], [], False

    async def call(self, method: str, **parameters) -> dict:
        self.sent += 1
        number = self.sent
        await self.socket.send_json({"id": number, "method": method, "params": parameters})
        while (message := await self._next()).get("id") != number:
            pass
        assert "error" not in message, (method, message["error"])
        return message["result"]

    async def _next(self) -> dict:
        message = await self.socket.receive_json(timeout=60)
        match message.get("method"):
            case "Runtime.exceptionThrown" | "Log.entryAdded":
                self.problems.append(message["params"])
            case "Runtime.consoleAPICalled" if message["params"]["type"] in ("error", "warning", "assert"):
                self.problems.append(message["params"])
            case "Network.requestWillBeSent":
                self.requests.append(message["params"]["request"]["url"])
            case "Page.loadEventFired":
                self.loaded = True
        return message

    async def js(self, expression: str):
        answer = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, (expression, answer["exceptionDetails"])
        return answer["result"].get("value")

    async def open(self, path: pathlib.Path, fragment: str = "", *, width: int = 1400, scheme: str = "light") -> None:
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.call(f"{domain}.enable")
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=1000, deviceScaleFactor=1, mobile=width < 600
        )
        await self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        await self.call("Page.navigate", url=path.as_uri() + fragment)
        while not self.loaded:
            await self._next()

    async def screenshot(self) -> bytes:
        return base64.b64decode((await self.call("Page.captureScreenshot", captureBeyondViewport=True))["data"])


def in_tab(port: int, check, *arguments, **options) -> None:
    """Opens a page in a new tab and runs `await check(tab)`; nothing may go wrong and nothing be fetched."""

    async def run() -> None:
        address = f"http://127.0.0.1:{port}/json"
        async with aiohttp.ClientSession() as session:
            async with session.put(f"{address}/new?about:blank") as answer:
                target = await answer.json(content_type=None)
            async with session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                tab = Tab(socket)
                await tab.open(*arguments, **options)
                await check(tab)
                assert tab.problems == []
                assert [url for url in tab.requests if url.split("#")[0] != arguments[0].as_uri()] == []
            async with session.get(f"{address}/close/{target['id']}"):
                pass

    asyncio.run(run())


def test_charts_and_table(port, page):
    async def check(tab):
        assert await tab.js("document.querySelectorAll('#charts figure svg').length") == 10
        drawn = await tab.js("[...document.querySelectorAll('#charts path')].map(p => p.getAttribute('d'))")
        assert len(drawn) == 11 and all(d.count("L") > 50 and "NaN" not in d for d in drawn)
        table = await tab.js("document.getElementById('figures').innerText")
        assert "all held-out tasks" in table and "+13.1" in table and "never in training" in table
        assert await tab.js(
            "document.querySelector('.wide').scrollWidth <= document.querySelector('.wide').clientWidth"
        )
        lag = "document.querySelectorAll('#charts svg')[6]"
        await tab.js(
            f"{{const svg = {lag}, box = svg.getBoundingClientRect();"
            "svg.dispatchEvent(new PointerEvent('pointermove', {clientX: box.right - 12, clientY: box.top + 60}))}"
        )
        tip = await tab.js("document.getElementById('tip').innerText")
        assert tip.startswith("step 80\n") and "mean" in tip and "max 5 learner steps" in tip

    in_tab(port, check, page)


def test_reader_shows_turns_and_token_ratios(port, page):
    async def check(tab):
        await tab.js("{const s = document.getElementById('by-where'); s.value = 'RL training'; "
                     "s.dispatchEvent(new Event('change'))}")  # fmt: skip
        listed = await tab.js("document.querySelectorAll('#list button').length")
        held = await tab.js("DATA.reader.rollouts.filter(r => r.where === 'rl').length")
        assert listed == held > 100
        first = await tab.js("document.querySelector('#rollout header b').innerText")
        await tab.js("document.getElementById('next').click(); new Promise(done => setTimeout(done, 200))")
        assert await tab.js("location.hash") == await tab.js("`#rollout-${current}`") != "#rollout-0"
        assert await tab.js("document.querySelector('#rollout header b').innerText") != first
        text = await tab.js("document.getElementById('rollout').innerText")
        for expected in (
            "System",
            "User",
            "Assistant",
            "reasoning",
            "tool call",
            "Observation",
            "reward",
            "RL training",
        ):
            assert expected in text
        assert "Rules apply." not in text  # the system prompt is folded
        await tab.js("document.querySelector('#rollout summary').click()")
        assert "Rules apply." in await tab.js("document.getElementById('rollout').innerText")

        token = "[...document.querySelectorAll('.tok')].find(t => t.textContent === '<|END_OF_TURN_TOKEN|>')"
        await tab.js(
            f"{token}.dispatchEvent(new PointerEvent('pointerover', {{bubbles: true, clientX: 9, clientY: 9}}))"
        )
        tip = await tab.js("document.getElementById('tip').innerText")
        _, sampler, trainer, version = await tab.js(f"{token}.token")
        assert abs(math.exp(trainer - sampler) - 1.6) < 1e-3
        for expected in (f"log p {sampler:.4f}", f"log p {trainer:.4f}", "ratio    1.6", f"version {version}"):
            assert expected in tip
        assert await tab.js(f"{token}.classList.contains('newer')")  # its weight version is not its neighbour's
        assert (await tab.js(f"{token}.style.background")).startswith("rgba(var(--high)")

        await tab.js(
            "{const s = document.getElementById('colour'); s.value = 'none'; s.dispatchEvent(new Event('change'))}"
        )
        assert await tab.js("[...document.querySelectorAll('.tok')].every(t => !t.style.background)")
        assert await tab.js("document.querySelector('#rollout .call pre').innerText.startsWith('<|START_ACTION|>')")

    in_tab(port, check, page)


def test_every_filter_narrows_and_every_rollout_opens(port, page):
    async def check(tab):
        for field, value, read in (
            ("family", "software", "family"),
            ("harness", "editor", "harness"),
            ("outcome", "solved", "solved"),
            ("template", "wrong-name", "template"),
        ):
            await tab.js(
                f"{{const s = document.getElementById('by-{field}'); s.value = {json.dumps(value)}; "
                "s.dispatchEvent(new Event('change'))}"
            )
            shown = await tab.js(f"matching().map(i => ROLLOUTS[i].{read})")
            assert shown and set(shown) == {True if field == "outcome" else value}
        offered = await tab.js("[...document.querySelectorAll('#filters option')].map(o => o.text)")
        assert len(offered) > 8 and not [text for text in offered if text.endswith("(0)")]
        await tab.js("ROLLOUTS.forEach((_, i) => show(i))")
        await tab.js("location.hash = '#rollout-7'; new Promise(done => setTimeout(done, 200))")
        assert await tab.js("document.querySelector('#rollout header b').innerText === ROLLOUTS[7].task")
        assert await tab.js("document.querySelectorAll('#list button').length === ROLLOUTS.length")

    in_tab(port, check, page)


def test_model_output_is_shown_and_never_run(port, page):
    async def check(tab):
        assert await tab.js("document.title") == "First light: SFT, then asynchronous RL"
        assert await tab.js("document.images.length") == 0
        assert await tab.js("document.scripts.length") == 2
        text = await tab.js("document.querySelector('#rollout').textContent")
        assert SYNTHETIC["SCRIPT_PAYLOAD"] in text and SYNTHETIC["IMAGE_PAYLOAD"] in text
        # Even if it got in as markup, the page's policy would not run it.
        await tab.js("document.body.insertAdjacentHTML('beforeend', '<i onclick=\"document.title=1\" id=bad></i>')")
        await tab.js("document.getElementById('bad').click()")
        assert await tab.js("document.title") == "First light: SFT, then asynchronous RL"
        assert len(tab.problems) == 1 and "Content Security Policy" in str(tab.problems.pop())

    in_tab(port, check, page, "#rollout-0")


def test_fits_a_phone_and_follows_the_colour_scheme(port, page, tmp_path):
    shots = {}

    async def check(tab):
        assert await tab.js("document.documentElement.scrollWidth") <= await tab.js("innerWidth")
        shots[await tab.js("getComputedStyle(document.body).backgroundColor")] = await tab.screenshot()

    in_tab(port, check, page, "#rollout-120", width=390, scheme="light")
    in_tab(port, check, page, "#rollout-120", width=390, scheme="dark")
    assert list(shots) == ["rgb(251, 251, 249)", "rgb(19, 21, 24)"]
    for number, png in enumerate(shots.values()):
        assert png.startswith(b"\x89PNG") and len(png) > 50_000
        (tmp_path / f"report{number}.png").write_bytes(png)


def test_prints_on_paper_width(port, page):
    async def check(tab):
        await tab.call("Emulation.setEmulatedMedia", media="print")
        assert await tab.js("document.documentElement.scrollWidth") <= 794
        assert await tab.js("getComputedStyle(document.getElementById('list')).display") == "none"
        pdf = base64.b64decode((await tab.call("Page.printToPDF", printBackground=True))["data"])
        assert pdf.startswith(b"%PDF")

    in_tab(port, check, page, width=794)


def test_an_empty_workdir_opens_without_errors(port, tmp_path):
    async def check(tab):
        text = await tab.js("document.body.innerText")
        assert "results.json is missing" in text and "holds no rollouts" in text and "Missing: reward" in text

    in_tab(port, check, build_report(tmp_path))
