"""The markers of tests that are not `quick`."""

TIERS = {
    "sglang": "needs a real SGLang server",
    "ray": "starts Ray",
    "slow": "trains a whole run, or takes more than some seconds",
    "sandbox": "runs code in bubblewrap",
    "browser": "opens a page in Chromium",
    "long": "takes a minute or more: learning curves over seeds, soaks, kills of whole runs; run by hand",
}
"""Marker: why a test is not `quick`. The slowest first: it is their order too."""
FIXTURES = {"sglang_venv": "sglang", "bubblewrap": "sandbox", "chromium": "browser"}
"""Fixture: the marker of every test that uses it."""
SHARED = ("sglang_url", "ray_address")
"""Fixtures of a whole session that take long to start: one process runs all files that name one of them."""
