"""Starting stand-ins and real servers in tests of the server process."""

from pathlib import Path

from agentrl.engine.servers.client import Sessions
from agentrl.engine.servers.server import Server
from agentrl.engine.sglang.command import SglangPlan

FAKE = """
import http.server, os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
open(sys.argv[1], "w").write(f"{os.getpid()} {child.pid}")
class Ok(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *a): pass
print("it serves", flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Ok).serve_forever()
"""


def plan(*command: str) -> SglangPlan:
    return SglangPlan(command=command, model_path="m", dtype="float32", flags={}, max_batch=4, token_bytes=1,
                      context=64, cpu=True)  # fmt: skip


async def started(launch: SglangPlan, log: Path, timeout: float = 60.0) -> Server:
    sessions = Sessions()
    server = Server(launch, 0, log, sessions)
    try:
        await server.start(timeout, lambda line: None)
    finally:
        await sessions.close()
    return server
