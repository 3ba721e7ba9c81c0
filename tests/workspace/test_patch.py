"""The difference that is kept of what a rollout changed."""

from agentrl.workspace.patch import difference


def test_a_difference_is_one_hunk_with_lines_around_it() -> None:
    assert difference("a\nb\nc\nd\ne\n", "a\nb\nC\nd\ne\n", "/p").splitlines() == [
        "--- a/p", "+++ b/p", "@@ -1,5 +1,5 @@", " a", " b", "-c", "+C", " d", " e",
    ]  # fmt: skip
    assert difference("", "new\n", "/p").splitlines()[2:] == ["@@ -1,0 +1,1 @@", "+new"]
    assert difference("x\nx\n", "x\n", "/p").splitlines()[2:] == ["@@ -1,2 +1,1 @@", " x", "-x"]


def test_texts_made_to_be_slow_are_not() -> None:
    lines = [f"{n % 150}" for n in range(30_000)]  # a search for the shortest difference takes minutes
    text = difference("\n".join(lines), "\n".join(reversed(lines)), "/p")
    assert text.count("\n") > 30_000
