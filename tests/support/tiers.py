"""The markers of tests that are not `quick`."""

TIERS = {
    "long": "takes a minute or more (learning curves over seeds, soaks, kills of whole runs), or is one more case of a "
    "slow test; run by hand",
    "ray": "starts Ray",
    "slow": "trains a whole run, starts processes that compute, or takes a second or more",
    "sandbox": "runs code in bubblewrap",
    "browser": "opens a page in Chromium",
    "environments": "needs packages of other people's environments",
    "sglang": "needs a real SGLang server",
    "vllm": "needs a real vLLM server",
}
"""Marker: why a test is not `quick`. It is the order of their files too: those of real servers late, since these may
still be installed, and then the quick ones, so that the processes that share the files end at about the same time."""
FIXTURES = {
    "environments_venv": "environments",
    "verifiers_venv": "environments",
    "torchtitan_venv": "environments",
    "sglang_venv": "sglang",
    "vllm_venv": "vllm",
    "bubblewrap": "sandbox",
    "chromium": "browser",
}
"""Fixture: the marker of every test that uses it."""
SHARED = ("sglang_url", "ray_address", "podman_help")
"""What takes long to start, for a whole session: one process runs all files that name one of them."""
