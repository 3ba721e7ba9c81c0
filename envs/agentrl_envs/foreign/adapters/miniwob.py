"""MiniWoB++: its pages in a headless Chromium, told as the accessibility tree that the browser computes.

One browser a process, one page a rollout. Pages come from the package's files; the browser finds no other host. Time is
no part of the game: pages that pay less to who is slow pay their raw reward, and none runs out.
"""

import contextlib
import fcntl
import itertools
import json
import os
import queue
import random
import re
import shutil
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import miniwob

PAGES = Path(miniwob.__file__).parent / "html" / "miniwob"
HELD_OUT = 1_000_000_007
"""Where the seeds of held-out tasks begin."""
SECONDS = 30.0
"""Time in which the browser must answer."""
AGAIN_SECONDS = 3.0
"""Time in which a page that was used before must show another file."""
LINES = 200
"""The most elements that an observation lists."""
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--hide-scrollbars", "--disable-dev-shm-usage",
    "--allow-file-access-from-files", "--host-resolver-rules=MAP * ~NOTFOUND", "--remote-debugging-pipe",
)  # fmt: skip
_HIDDEN = "['query', 'reward-display', 'sync-task-cover', 'click-canvas']"
_START = """(seed => {
  core.EPISODE_MAX_TIME = 1e9;
  Math.seedrandom(seed);
  core.startEpisodeReal();
  for (const id of %s) document.getElementById(id)?.setAttribute('aria-hidden', 'true');
  return document.getElementById('query').innerText;
})(%d)"""
_LOOK = "[WOB_DONE_GLOBAL, WOB_RAW_REWARD_GLOBAL]"
_QUOTED = re.compile(r'"([^"]+)"')
STYLES = ("named", "random", "careless")
CAREFUL = 0.4
"""The share of careless clicks that are right for certain."""
WIDGETS = {"textbox": "text"}
"""What pages call a role that the browser calls otherwise."""
_SKIPPED = frozenset(("RootWebArea", "InlineTextBox", "generic", "none", "paragraph", "LineBreak", "Section", "LabelText",
                      "MenuListPopup"))  # fmt: skip
_KEYS = {"Enter": 13, "Tab": 9, "Backspace": 8, "Escape": 27, "ArrowDown": 40, "ArrowUp": 38, "ArrowLeft": 37,
         "ArrowRight": 39}  # fmt: skip
_REF = {"type": "integer", "description": "Number of an element."}


def _tool(name: str, description: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"name": name, "description": description, "parameters": parameters}


TOOLS = (
    _tool("click", "Click on an element.", ref=_REF),
    _tool("type", "Write a text into an element, in place of what it holds.", ref=_REF,
          text={"type": "string", "description": "What to write."}),
    _tool("press", "Press a key.", key={"type": "string", "enum": [*_KEYS], "description": "The key."}),
    _tool("select", "Choose an option of a list.", ref=_REF,
          option={"type": "string", "description": "Its text."}),
    _tool("drag", "Drag an element onto another.", ref=_REF, to={"type": "integer", "description": "Where to."}),
    _tool("click_at", "Click on a point of the page.", x={"type": "integer", "description": "From the left."},
          y={"type": "integer", "description": "From the top."}),
)  # fmt: skip


class Adapter:
    """task: the name of a page, such as `click-test-2`, or several, which take turns. tools: those that are offered; by
    default all. chromium: the browser. train, held_out: how many tasks, each a seed. seed: of the first."""

    def __init__(
        self,
        task: str | list[str],
        tools: list[str] | None = None,
        chromium: str = "chromium",
        train: int = 10_000,
        held_out: int = 200,
        seed: int = 0,
    ) -> None:
        self.names = [task] if isinstance(task, str) else list(task)
        for name in self.names:
            if not (PAGES / f"{name}.html").is_file():
                raise ValueError(f"miniwob has no page {name!r}")
        known = {tool["name"]: tool for tool in TOOLS}
        self.tools = [known[name] for name in tools] if tools is not None else list(TOOLS)
        self.sizes, self.seed = {"train": train, "test": held_out}, seed
        path = shutil.which(chromium)
        if path is None:
            raise ValueError(f"there is no browser {chromium!r}: install the package chromium, or name it by `chromium`")
        self.path = path
        self.browser: Browser | None = None
        self.starting = threading.Lock()

    def describe(self) -> dict[str, Any]:
        """See docs/foreign.md."""
        return {
            "name": self.names[0] if len(self.names) == 1 else "miniwob",
            "splits": self.sizes,
            "tools": self.tools,
            "reward_parts": ["page"],
            "solved": {"page": 1.0},
            "cannot": {"images": "pages are told as text", "time": "no page runs out, none pays less to the slow"},
        }

    def task(self, split: str, index: int) -> dict[str, Any]:
        """The page and its seed."""
        first = self.seed if split == "train" else HELD_OUT
        return {"page": self.names[index % len(self.names)], "seed": first + index}

    def open(self, task: dict[str, Any], seed: int) -> "Episode":
        """One rollout."""
        with self.starting:
            if self.browser is None:
                self.browser = Browser(self.path)
        return Episode(self.browser, task)


    def demonstrate(self, task: dict[str, Any], seed: int, style: str) -> list[dict[str, Any]]:
        """A page played in a style: `named` clicks on the element whose role or name stands in quotes in what is asked,
        `random` on any, `careless` on one or the other. Pages that ask for more have no demonstrations."""
        if style not in STYLES:
            raise ValueError(f"there is no style {style!r}: miniwob has {', '.join(STYLES)}")
        rng, episode = random.Random(seed), self.open(task, seed)
        try:
            named = style == "named" or (style == "careless" and rng.random() < CAREFUL)
            ref = episode.choose(rng, named)
            result = episode.call("click", {"ref": ref})
        finally:
            episode.close()
        call = {"type": "function", "function": {"name": "click", "arguments": {"ref": ref}}}
        return [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "name": "click", "content": result["text"]},
        ]


class Episode:
    """A page while it is played."""

    def __init__(self, browser: "Browser", task: dict[str, Any]) -> None:
        self._browser = browser
        self._refs: dict[int, int] = {}  # the number of an element: the browser's
        self._done, self._reward = False, -1.0
        self._page = browser.opened((PAGES / f"{task['page']}.html").as_uri())
        try:
            said = self._page.value(_START % (_HIDDEN, task["seed"]))
            self.messages = f"{said}\n{self._tree()}"
        except BaseException:
            self._page.close()  # nobody knows what it does now
            raise

    def step(self, message: dict[str, Any]) -> None:
        """An answer without a call ends it."""

    def call(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Act, and tell what the page is then."""
        try:
            getattr(self, f"_{name}")(**arguments)
        except LookupError as error:
            return {"text": str(error.args[0]), "error": True}
        self._page.value("new Promise(done => setTimeout(() => done(1), 5))")
        self._done, reward = self._page.value(_LOOK)
        if not self._done:
            return {"text": self._tree()}
        self._reward = float(reward)
        return {"text": "The page is done.", "done": True}

    def choose(self, rng: random.Random, named: bool) -> int:
        """The number of an element to click on. Raises ValueError: none has the role or name that is asked for."""
        asked, _, tree = self.messages.partition("\n")
        lines = [line.partition("] ")[2] for line in tree.split("\n")]
        if not named:
            return rng.randrange(len(self._refs)) + 1
        wanted = _QUOTED.search(asked)
        for number, line in enumerate(lines, 1):
            role, _, name = line.partition(" ")
            if wanted and wanted.group(1) in (name.strip('"'), WIDGETS.get(role, role)):
                return number
        raise ValueError(f"this page has no demonstrations: {asked[:80]}")

    def _tree(self) -> str:
        """The page's elements, a line each: number, role, name and state."""
        nodes = _in_order(self._page.ask("Accessibility.getFullAXTree")["nodes"])
        names = {node["nodeId"]: _value(node, "name") for node in nodes}
        self._refs, lines = {}, []
        for node in nodes:
            role, name = _value(node, "role"), _value(node, "name")
            silent = node.get("ignored") or "backendDOMNodeId" not in node or role in _SKIPPED or (role == "StaticText" and not name.strip())
            if silent or (role == "StaticText" and names.get(node.get("parentId"), "").strip() == name.strip()):
                continue
            number = len(self._refs) + 1
            self._refs[number] = node["backendDOMNodeId"]
            lines.append(f"[{number}] {_line(node, role, name)}")
            if len(lines) == LINES:
                lines.append("(and more)")
                break
        return "\n".join(lines) or "(an empty page)"

    def _node(self, ref: int) -> int:
        if ref not in self._refs:
            raise LookupError(f"there is no element {ref}")
        return self._refs[ref]

    def _middle(self, ref: int) -> tuple[float, float]:
        """The middle of an element, which is scrolled to."""
        node = self._node(ref)
        try:
            self._page.ask("DOM.scrollIntoViewIfNeeded", backendNodeId=node)
            quads = self._page.ask("DOM.getContentQuads", backendNodeId=node)["quads"]
        except ProtocolError:
            quads = []
        if not quads:
            raise LookupError(f"element {ref} is not to be seen any more")
        return sum(quads[0][0::2]) / 4, sum(quads[0][1::2]) / 4

    def _mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        self._page.ask("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def _click_at(self, x: float, y: float) -> None:
        self._mouse("mouseMoved", x, y)
        for kind in ("mousePressed", "mouseReleased"):
            self._mouse(kind, x, y, button="left", clickCount=1)

    def _click(self, ref: int) -> None:
        self._click_at(*self._middle(ref))

    def _drag(self, ref: int, to: int) -> None:
        (x, y), (end_x, end_y) = self._middle(ref), self._middle(to)
        self._mouse("mouseMoved", x, y)
        self._mouse("mousePressed", x, y, button="left", clickCount=1)
        for part in (0.25, 0.5, 0.75, 1.0):
            self._mouse("mouseMoved", x + part * (end_x - x), y + part * (end_y - y), button="left", buttons=1)
        self._mouse("mouseReleased", end_x, end_y, button="left", clickCount=1)

    def _type(self, ref: int, text: str) -> None:
        try:
            self._page.ask("DOM.focus", backendNodeId=self._node(ref))
        except ProtocolError:
            raise LookupError(f"element {ref} takes no text") from None
        self._page.value("document.activeElement.select && document.activeElement.select()")
        self._press("Backspace")
        self._page.ask("Input.insertText", text=text)

    def _press(self, key: str) -> None:
        code = _KEYS[key]
        text = {"text": "\r"} if key == "Enter" else {}
        self._page.ask("Input.dispatchKeyEvent", type="keyDown", key=key, windowsVirtualKeyCode=code, **text)
        self._page.ask("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)

    def _select(self, ref: int, option: str) -> None:
        node = self._page.ask("DOM.resolveNode", backendNodeId=self._node(ref))["object"]["objectId"]
        chosen = self._page.ask(
            "Runtime.callFunctionOn", objectId=node, returnByValue=True, arguments=[{"value": option}],
            functionDeclaration="""function(text) {
              const found = [...(this.options || [])].find(one => one.text.trim() === text.trim());
              if (!found) return false;
              found.selected = true;
              for (const kind of ['input', 'change']) this.dispatchEvent(new Event(kind, {bubbles: true}));
              return true;
            }""",
        )["result"]["value"]  # fmt: skip
        if not chosen:
            raise LookupError(f"element {ref} has no option {option!r}")

    def grade(self) -> dict[str, Any]:
        """The page's raw reward; -1, as the page's own clock would give, where it is not done."""
        return {"rewards": {"page": self._reward}, "metrics": {"done": float(self._done)}}

    def close(self) -> None:
        """Give the page back."""
        self._browser.give_back(self._page)


def _value(node: dict[str, Any], key: str) -> str:
    return str(node.get(key, {}).get("value", ""))


def _in_order(nodes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Nodes of a tree in the order of the page."""
    by_id = {node["nodeId"]: node for node in nodes}
    ordered, waiting = [], [node for node in reversed(nodes) if node.get("parentId") not in by_id]
    while waiting:
        node = waiting.pop()
        ordered.append(node)
        waiting += [by_id[child] for child in reversed(node.get("childIds", ())) if child in by_id]
    return ordered


def _line(node: dict[str, Any], role: str, name: str) -> str:
    """An element in words."""
    words = [f'"{name}"'] if role == "StaticText" else [role, *([f'"{name}"'] if name else [])]
    value = _value(node, "value")
    if value and value != name:
        words.append(f"= {value!r}")
    for entry in node.get("properties", ()):
        state = entry["value"].get("value")
        if entry["name"] in ("checked", "selected", "expanded", "disabled") and state in (True, "true", "mixed"):
            words.append(entry["name"])
    return " ".join(words)


class ProtocolError(Exception):
    """The browser refused a command."""


class Browser:
    """A Chromium, spoken to over two pipes. Pages are used again: each rollout loads its page anew."""

    def __init__(self, path: str) -> None:
        self._folder = tempfile.mkdtemp(prefix="miniwob-")
        theirs_in, self._out = _high(os.pipe())
        self._in, theirs_out = _high(os.pipe())
        command = [path, *FLAGS, f"--user-data-dir={self._folder}", "about:blank"]
        actions: list[Any] = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in range(3)]
        actions += [(os.POSIX_SPAWN_DUP2, theirs_in, 3), (os.POSIX_SPAWN_DUP2, theirs_out, 4)]
        os.posix_spawn(path, command, os.environ, file_actions=actions)  # it ends when its pipes do
        os.close(theirs_in)
        os.close(theirs_out)
        self._numbers = itertools.count(1)
        self._waiting: dict[int, queue.SimpleQueue[dict[str, Any]]] = {}
        self._writing = threading.Lock()
        self._free: queue.SimpleQueue[Page] = queue.SimpleQueue()
        threading.Thread(target=self._read, name="chromium", daemon=True).start()

    def _read(self) -> None:
        with open(self._in, "rb", buffering=1 << 20) as stream:
            rest = b""
            while data := stream.read1(1 << 20):
                *whole, rest = (rest + data).split(b"\0")
                for line in whole:
                    told = json.loads(line)
                    if (waiting := self._waiting.pop(told.get("id", 0), None)) is not None:
                        waiting.put(told)
        for waiting in list(self._waiting.values()):
            waiting.put({"gone": True})

    def ask(self, method: str, session: str = "", seconds: float = SECONDS, **given: Any) -> Any:
        """The result of a command. Raises ProtocolError, and RuntimeError for a browser that does not answer."""
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": given}
        if session:
            message["sessionId"] = session
        answer: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._waiting[number] = answer
        line = json.dumps(message).encode() + b"\0"
        try:
            with self._writing:
                while line:
                    line = line[os.write(self._out, line) :]
            told = answer.get(timeout=seconds)
        except (OSError, queue.Empty):
            raise RuntimeError(f"chromium did not answer {method} within {seconds:g} s") from None
        finally:
            self._waiting.pop(number, None)
        if "gone" in told:
            raise RuntimeError("chromium ended")
        if "error" in told:
            raise ProtocolError(f"{method}: {told['error'].get('message')}")
        return told["result"]

    def opened(self, url: str) -> "Page":
        """A page that shows a file. One that was used before may refuse to go on to another (those with jQuery's
        autocompletion do): a new one takes its place."""
        with contextlib.suppress(queue.Empty):
            page = self._free.get_nowait()
            try:
                page.open(url, AGAIN_SECONDS)
                return page
            except RuntimeError:
                page.close()
        page = Page(self)
        page.open(url, SECONDS)
        return page

    def give_back(self, page: "Page") -> None:
        """Let another rollout have a page."""
        self._free.put(page)


class Page:
    """A page of its own, in a context of its own."""

    def __init__(self, browser: Browser) -> None:
        self._browser = browser
        context = browser.ask("Target.createBrowserContext")["browserContextId"]
        target = browser.ask("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        self._target = target
        self._session = browser.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.ask("Emulation.setFocusEmulationEnabled", enabled=True)
        self.ask("Emulation.setDeviceMetricsOverride", width=500, height=320, deviceScaleFactor=1, mobile=False)
        for domain in ("Page", "DOM", "Accessibility"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **given: Any) -> Any:
        """The result of a command."""
        return self._browser.ask(method, self._session, SECONDS, **given)

    def value(self, script: str) -> Any:
        """The value of an expression. Raises RuntimeError."""
        found = self.ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(str(found["exceptionDetails"].get("exception", {}).get("description"))[:300])
        return found["result"].get("value")

    def close(self) -> None:
        """Close it for good."""
        with contextlib.suppress(ProtocolError, RuntimeError):
            self._browser.ask("Target.closeTarget", targetId=self._target)

    def open(self, url: str, seconds: float) -> None:
        """Load a page, and wait until it is ready. Raises RuntimeError."""
        until = time.monotonic() + seconds
        for address in ("about:blank", url):
            self._browser.ask("Page.navigate", self._session, seconds, url=address)
        ready = "document.readyState === 'complete' && typeof core === 'object' && !!core.cover_div && WOB_TASK_READY"
        while time.monotonic() < until:
            with contextlib.suppress(ProtocolError, RuntimeError):
                if self.value(f"location.href === {json.dumps(url)} && {ready}"):
                    return
            time.sleep(0.005)
        raise RuntimeError(f"{url} was not ready within {seconds:g} s")


def _high(ends: tuple[int, int]) -> tuple[int, int]:
    """Both ends of a pipe under numbers that the browser's own do not take."""
    moved = []
    for end in ends:
        moved.append(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 20))
        os.close(end)
    return moved[0], moved[1]
