"""An audit as one HTML file without external resources. All texts are escaped: environments and models wrote them."""

from collections.abc import Sequence
from html import escape
from pathlib import Path

from agentrl.audit.finding import Finding, Report, Row, Severity
from agentrl.errors import UserError

STYLE = """
:root { color-scheme: light dark; --ink:#1c2430; --soft:#5b6675; --line:#d8dde6; --card:#fff; --page:#f5f7fa;
  --good:#17734f; --high:#b3261e; --medium:#8a5a00; --low:#2f5fd0; --info:#5b6675; --bar:#c9d6f5; --said:#eef2f8 }
@media (prefers-color-scheme: dark) { :root { --ink:#e6e9ef; --soft:#a3adbd; --line:#343b48; --card:#1d222b;
  --page:#14181f; --good:#5fc79a; --high:#ff8a80; --medium:#f0c060; --low:#8fb0ff; --info:#a3adbd; --bar:#2b3c66;
  --said:#262d3a } }
* { box-sizing:border-box } body { margin:0; background:var(--page); color:var(--ink);
  font:15px/1.5 system-ui,sans-serif } main { max-width:1100px; margin:0 auto; padding:20px 16px }
h1 { font-size:24px; margin:0 0 8px; overflow-wrap:anywhere } h2 { font-size:19px; margin:28px 0 6px }
p { margin:0 0 8px } .soft { color:var(--soft) } .good { color:var(--good) }
.scroll { overflow-x:auto } table { border-collapse:collapse; background:var(--card); width:100% }
th,td { border:1px solid var(--line); padding:4px 10px; text-align:right; white-space:nowrap }
th:first-child,td:first-child,th:nth-child(2),td:nth-child(2) { text-align:left }
td:nth-child(2) { white-space:normal; overflow-wrap:anywhere }
.share { background:linear-gradient(90deg,var(--bar) var(--s),transparent var(--s)); min-width:90px }
details { background:var(--card); border:1px solid var(--line); border-radius:8px; margin:6px 0; padding:6px 12px }
summary { cursor:pointer } .finding { background:var(--card); border:1px solid var(--line); border-left:5px solid;
  border-radius:8px; margin:8px 0; padding:8px 14px } .finding p { margin:2px 0 }
.high { border-left-color:var(--high) } .medium { border-left-color:var(--medium) }
.low { border-left-color:var(--low) } .info { border-left-color:var(--info) }
.finding b.s { margin-right:8px } .high b.s { color:var(--high) }
.medium b.s { color:var(--medium) } .low b.s { color:var(--low) } .info b.s { color:var(--info) }
code { overflow-wrap:anywhere } pre { background:var(--said); border-radius:6px; padding:6px 9px; margin:4px 0;
  white-space:pre-wrap; overflow-wrap:anywhere; font-size:13px }
"""


def write_page(report: Report, path: str) -> None:
    """Write the page. Raises UserError: the file cannot be written."""
    try:
        Path(path).write_text(render(report), encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise UserError(f"--page {path}: cannot be written: {error.strerror}") from error


def render(report: Report) -> str:
    """The page."""
    title = f"Audit of {report.subject}"
    splits = ", ".join(f"{split} {size:,}" for split, size in report.splits.items())
    counts = [(severity, sum(f.severity is severity for f in report.findings)) for severity in Severity]
    summary = ", ".join(f"{count} {severity}" for severity, count in counts if count) or "nothing was found"
    played = f"{report.plays:,} rollouts in {report.seconds:.0f} s"
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width,initial-scale=1"><style>{STYLE}</style></head><body><main>'
        f"<h1>{escape(title)}</h1><p>Findings: {escape(summary)}</p>"
        f"<p class=soft>Tasks: {escape(splits or 'none were read')}. {played}.</p>"
        f"<h2>Findings</h2>{_findings(report.findings)}"
        f"<h2>What each policy earns</h2>{_table(report.best())}{_attempts(report.rows)}</main></body></html>\n"
    )


def _findings(findings: Sequence[Finding]) -> str:
    if not findings:
        return '<p class="good">Nothing was found.</p>'
    return "".join(map(_finding, findings))


def _finding(finding: Finding) -> str:
    tasks = ", ".join(f"<code>{escape(task)}</code>" for task in finding.tasks)
    looked = f"<p class=soft>Tasks to look at: {tasks}</p>" if tasks else ""
    shown = f"<pre>{escape(finding.shown)}</pre>" if finding.shown else ""
    return (
        f'<section class="finding {finding.severity}"><p><b class="s">{finding.severity}</b>'
        f"<b>{escape(finding.kind)}</b> {escape(finding.line)}</p>{shown}"
        f"<p class=soft>Look for: {escape(finding.cause)}</p>{looked}</section>"
    )


def _table(rows: Sequence[Row]) -> str:
    body = "".join(
        f"<tr><td>{escape(row.policy)}</td><td>{escape(row.attempt)}</td><td>{row.tasks}</td>"
        f'<td>{row.reward:.2f}</td><td class="share" style="--s:{max(0.0, min(1.0, row.solved)):.0%}">'
        f"{row.solved:.0%}</td></tr>"
        for row in rows
    )
    head = "<tr><th>policy</th><th>attempt</th><th>tasks</th><th>reward</th><th>solved</th></tr>"
    return f'<div class="scroll" tabindex="0"><table>{head}{body}</table></div>'


def _attempts(rows: Sequence[Row]) -> str:
    return f"<details><summary>All {len(rows)} attempts</summary>{_table(rows)}</details>" if rows else ""
