"""The markers of tests that are not `quick`."""

TIERS = {
    "sglang": "needs a real SGLang server",
    "vllm": "needs a real vLLM server",
    "ray": "starts Ray",
    "slow": "trains a whole run, or takes more than some seconds",
    "sandbox": "runs code in bubblewrap",
    "browser": "opens a page in Chromium",
    "long": "takes a minute or more: learning curves over seeds, soaks, kills of whole runs; run by hand",
}
"""Marker: why a test is not `quick`. The slowest first: it is their order too."""
FIXTURES = {"sglang_venv": "sglang", "vllm_venv": "vllm", "bubblewrap": "sandbox", "chromium": "browser"}
"""Fixture: the marker of every test that uses it."""
