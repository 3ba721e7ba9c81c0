"""Files of the request's workspace, for models that need no shell: list, read, write, search."""

import io
import tarfile
from fnmatch import fnmatch

from agentrl import ArgumentError, Session, ToolResponse
from agentrl.errors import PathError
from agentrl.plugins.types import Json
from agentrl.workspace.workspace import FileInfo, FileKind, Workspace
from agentrl_tools.screen import cut_middle
from agentrl_tools.workspace_tool import WorkspaceTool

SEARCHED = 16 << 20
"""Bytes that one search reads."""
_DEPTH = 32
_LISTED = 1000
_HITS = 100
_WIDTH = 200  # characters shown of a line that was found


class Files(WorkspaceTool):
    """output: characters that the model reads of one result; of longer ones the middle is left out."""

    name = "files"
    description = (
        "Works with files. `list` shows a folder; `read` a file; `write` replaces a file by `text`, or makes it; "
        "`search` finds files whose path matches `glob` and, where `text` is given, their lines that hold it."
    )

    def __init__(self, output: int = 16_000) -> None:
        self.output = output
        self.parameters = {
            "type": "object",
            "properties": {
                "command": {"type": "string", "enum": ["list", "read", "write", "search"]},
                "path": {"type": "string", "description": "of a file, or of the folder to list or search in"},
                "text": {"type": "string", "description": "what to write, or to search for"},
                "glob": {"type": "string", "description": "such as *.txt or src/*.py"},
            },
            "required": ["command"],
        }

    async def execute(self, session: Session, **arguments: Json) -> ToolResponse:
        """Do one of the commands. Raises ArgumentError, one line for the model."""
        workspace, command = self.workspace(session), arguments["command"]
        path, text, glob = arguments.get("path", "."), arguments.get("text"), arguments.get("glob", "*")
        if "\0" in path or not path:
            raise ArgumentError("`path` is empty or holds a NUL character")
        if command == "write":
            if text is None:
                raise ArgumentError("`write` needs `text`")
            await workspace.write(path, text.encode(errors="replace"))
            return ToolResponse(f"{path} is written")
        if command == "read":
            return ToolResponse(self._bounded((await workspace.read(path)).decode(errors="replace")))
        if command == "list":
            found = await workspace.listing(path, limit=_LISTED)
            return ToolResponse(self._bounded("\n".join(map(_name, found))))
        return ToolResponse(self._bounded(await _search(workspace, path, glob, text)))

    def _bounded(self, text: str) -> str:
        cut = cut_middle(text, self.output)
        if cut is None:
            return text or "[nothing]"
        left = len(text) - len(cut[0]) - len(cut[1])
        return f"{cut[0]}[... {left} characters are left out ...]\n{cut[1]}"


def _name(info: FileInfo) -> str:
    return f"{info.path}/" if info.kind is FileKind.FOLDER else info.path


async def _search(workspace: Workspace, path: str, glob: str, text: str | None) -> str:
    """Paths, or the lines that hold `text`, as `grep` shows them. Raises ArgumentError."""
    infos = await workspace.listing(path, depth=_DEPTH)
    found = [i for i in infos if i.kind is FileKind.FILE and _matches(i.path, glob)]
    if not text:
        return "\n".join(info.path for info in found[:_LISTED])
    if sum(info.size for info in found) > SEARCHED:
        raise ArgumentError(f"the files have more than {SEARCHED} bytes together: narrow `glob` or `path`")
    top = workspace.absolute(path).rstrip("/")
    hits: list[str] = []
    with tarfile.open(fileobj=io.BytesIO(await workspace.pack([f"{top}/{info.path}" for info in found]))) as tar:
        for info in found:
            hits += _hits(tar, f"{top}/{info.path}".lstrip("/"), info.path, text)
            if len(hits) >= _HITS:
                return "\n".join([*hits[:_HITS], f"[only the first {_HITS} are shown]"])
    return "\n".join(hits)


def _matches(path: str, glob: str) -> bool:
    """Whether a path matches; a glob without a folder is about the file's name alone."""
    return fnmatch(path if "/" in glob else path.rsplit("/", 1)[-1], glob)


def _hits(tar: tarfile.TarFile, member: str, path: str, text: str) -> list[str]:
    try:
        file = tar.extractfile(member)
    except KeyError:  # it went meanwhile
        return []
    except tarfile.TarError as error:
        raise PathError(f"{path}: {error}") from None
    lines = file.read().decode(errors="replace").splitlines() if file is not None else []
    return [f"{path}:{number}: {line[:_WIDTH]}" for number, line in enumerate(lines, 1) if text in line]
