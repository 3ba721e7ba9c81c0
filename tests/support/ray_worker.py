"""The script by which Ray starts a worker in tests: it has one forked, as `warm_ray` says. Little is imported here."""

import json
import os
import socket
import struct
import sys

SOCKET = "AGENTRL_TEST_RAY_WORKERS"
CONTEXT, LANGUAGE = "--serialized-runtime-env-context=", "--language="


def main() -> None:
    words = [word for word in sys.argv[1:] if not word.startswith((CONTEXT, LANGUAGE))]
    context = json.loads(next((w.removeprefix(CONTEXT) for w in sys.argv if w.startswith(CONTEXT)), "") or "{}")
    env = {**os.environ, **context.get("env_vars", {})}
    client = socket.socket(socket.AF_UNIX)
    try:
        client.connect(os.environ[SOCKET])
    except (KeyError, OSError):
        os.execve(sys.executable, [sys.executable, *words], env)
    body = json.dumps({"words": words, "env": env, "cwd": os.getcwd()}).encode()
    socket.send_fds(client, [struct.pack("!I", len(body))], [0, 1, 2])
    client.sendall(body)
    status = client.recv(4)
    os._exit(os.waitstatus_to_exitcode(struct.unpack("!I", status)[0]) & 0xFF if len(status) == 4 else 1)


main()
