"""A headless Chromium, by the DevTools protocol."""

import asyncio
import json
import subprocess
import threading
from pathlib import Path
from typing import Any

import aiohttp

FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--hide-scrollbars", "--remote-debugging-port=0",
)  # fmt: skip


class Browser:
    """One page of one browser: opened, steered and asked from synchronous code."""

    def __init__(self, chromium: str, profile: Path) -> None:
        self.errors: list[str] = []
        """What the page's console, its exceptions and its requests complained of."""
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._count = 0
        command = [chromium, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        said = ""
        while "DevTools listening on " not in said:
            said = self._process.stderr.readline()
            assert said, "Chromium ended at once"
        threading.Thread(target=self._process.stderr.read, daemon=True).start()
        port = said.rpartition("ws://")[2].split("/")[0]
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._wait(self._connect(port))
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def _wait(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(120)

    async def _connect(self, port: str) -> None:
        self._session = aiohttp.ClientSession()
        async with self._session.get(f"http://{port}/json") as answer:
            page = next(one for one in await answer.json() if one["type"] == "page")
        self._socket = await self._session.ws_connect(page["webSocketDebuggerUrl"], max_msg_size=0)
        self._reader = asyncio.ensure_future(self._read())

    async def _read(self) -> None:
        async for message in self._socket:
            told = json.loads(message.data)
            if "id" in told:
                self._answers.pop(told["id"]).set_result(told)
            elif told["method"] == "Runtime.exceptionThrown":
                details = told["params"]["exceptionDetails"]
                self.errors.append(details.get("exception", {}).get("description") or details["text"])
            elif told["method"] == "Log.entryAdded" and told["params"]["entry"]["level"] == "error":
                self.errors.append(f"{told['params']['entry']['text']} {told['params']['entry'].get('url', '')}")
            elif told["method"] == "Runtime.consoleAPICalled" and told["params"]["type"] in ("error", "warning"):
                self.errors.append(str([one.get("value") for one in told["params"]["args"]]))

    async def _ask(self, method: str, given: dict[str, Any]) -> Any:
        self._count += 1
        answer = self._answers[self._count] = self._loop.create_future()
        await self._socket.send_json({"id": self._count, "method": method, "params": given})
        return await answer

    def send(self, method: str, **given: Any) -> Any:
        """The result of a command of the protocol."""
        answer = self._wait(self._ask(method, given))
        assert "error" not in answer, answer
        return answer["result"]

    def evaluate(self, script: str) -> Any:
        """The value of an expression; of a promise, what it becomes."""
        found = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def until(self, condition: str, seconds: float = 20) -> Any:
        """The value of an expression as soon as it is one that counts as true."""
        script = f"""new Promise((done, fail) => {{
            const end = performance.now() + {1000 * seconds};
            const look = () => {{
                let found = null;
                try {{ found = ({condition}); }} catch (error) {{ found = null; }}
                if (found) done(found);
                else if (performance.now() > end) fail(new Error("not within {seconds} s"));
                else setTimeout(look, 10);
            }};
            look();
        }})"""
        return self.evaluate(script)

    def open(self, address: str) -> None:
        """Open an address, and wait until it is loaded."""
        self.send("Page.navigate", url=address)
        self.until("document.readyState === 'complete'")

    def key(self, key: str) -> None:
        """Press a key."""
        text = {"text": key} if len(key) == 1 else {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=key, **(text if kind == "keyDown" else {}))

    def write(self, text: str) -> None:
        """Write a text into the field that has the focus."""
        self.send("Input.insertText", text=text)

    def look(self, width: int = 1280, height: int = 860, dark: bool = False) -> None:
        """Set the size of the page, and whether its reader prefers dark colours."""
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.send("Emulation.setEmulatedMedia", features=features)

    def close(self) -> None:
        """End the browser."""

        async def leave() -> None:
            self._reader.cancel()
            await self._session.close()

        self._wait(leave())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._process.terminate()
        self._process.wait(30)
