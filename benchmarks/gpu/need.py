"""What a benchmark on GPUs needs of the machine; without it, one line and exit code 2."""

import os
import sys
from pathlib import Path

VENV = "AGENTRL_SGLANG_VENV"


def need(name: str, gpus: int = 1, *, sglang: bool = True) -> None:
    """Where `gpus` GPUs are there, and SGLang to launch; else the script `name` ends here."""
    import torch

    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    missing = []
    if found < gpus:
        missing.append(f"{gpus} GPU(s), torch sees {found}")
    place = os.environ.get(VENV)
    if sglang and (not place or not (Path(place) / "bin" / "python").exists()):
        missing.append(f"SGLang in a virtual environment that {VENV} names")
    if missing:
        print(f"{name}: missing: {'; '.join(missing)}", file=sys.stderr)
        raise SystemExit(2)
