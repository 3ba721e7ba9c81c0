"""An audit in the terminal: what each policy earns, and the findings, the most severe first."""

from typing import TYPE_CHECKING

from agentrl.audit.finding import Report, Severity

if TYPE_CHECKING:
    from rich.console import Console

COLOURS = {Severity.HIGH: "bold red", Severity.MEDIUM: "yellow", Severity.LOW: "cyan", Severity.INFO: "dim"}


def show(out: "Console", report: Report) -> None:
    """Print a report."""
    from rich.table import Table
    from rich.text import Text

    splits = ", ".join(f"{split} {size:,}" for split, size in report.splits.items())
    out.print(f"{report.subject}: {splits or 'no tasks were read'}", markup=False)
    policies = Table("policy", "its best attempt", box=None, pad_edge=False)
    for name in ("tasks", "reward", "solved"):
        policies.add_column(name, justify="right")
    for row in report.best():
        policies.add_row(row.policy, Text(row.attempt), str(row.tasks), f"{row.reward:.2f}", f"{row.solved:.0%}")
    out.print(policies)
    table = Table("severity", "finding", "what was seen", "tasks to look at", box=None, pad_edge=False)
    for finding in report.findings:
        severity = Text(str(finding.severity), style=COLOURS[finding.severity])
        seen = Text(finding.line)
        if finding.severity is not Severity.INFO:
            seen.append(f"\n{finding.cause}", style="dim")
        table.add_row(severity, finding.kind, seen, Text(", ".join(finding.tasks[:4])))
    out.print(table if report.findings else "nothing was found")
    out.print(f"{report.plays:,} rollouts in {report.seconds:.0f} s", style="dim")
