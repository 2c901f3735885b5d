"""What a person reads: a table a section, and one of what is promised."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvstore.bench.floors import Verdict
from kvstore.bench.timing import Samples, ratio

if TYPE_CHECKING:
    from rich.console import Console

    from kvstore.bench.suite import Outcome, Section


def ratio_to(section: Section, row: Samples) -> float | None:
    """A row's rate as a fraction of its section's reference, within the same rounds.

    A durable store is compared with the durable limit, every other row with the reference.
    """
    reference = section.reference
    if row.key.endswith("durable") and not row.key.endswith("not_durable"):
        reference = f"{section.key}.limit_durable"
    for other in section.rows:
        if other.key == reference:
            return ratio(row, other)
    return None


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _rate(section: Section, row: Samples) -> str:
    return f"{row.rate / 1e9:.2f}" if section.unit == "B/s" else f"{row.rate:,.0f}"


def _section_table(section: Section) -> Any:
    from rich.table import Table

    table = Table(title=section.title, title_justify="left", title_style="bold")
    table.add_column("contender")
    table.add_column("GB/s" if section.unit == "B/s" else section.unit, justify="right")
    table.add_column("of the limit" if section.unit == "B/s" else "of few", justify="right")
    table.add_column("bytes" if section.unit == "B/s" else "answers")
    for row in section.rows:
        share = ratio_to(section, row)
        proof = {None: "-", True: "equal", False: "[bold red]DIFFER[/]"}[row.correct]
        style = "cyan" if "limit" in row.key else None
        table.add_row(
            row.title,
            _rate(section, row),
            "" if share is None else f"{share:.3f}",
            proof,
            style=style,
        )
    for title in section.absent.values():
        table.add_row(title, "not installed", "", "", style="dim")
    return table


def _floor_row(verdict: Verdict) -> tuple[str, str, str, str]:
    sign = "<=" if verdict.floor.at_most else ">="
    value = "not measured" if verdict.value is None else _number(verdict.value)
    if verdict.ceiling is not None:
        value += f" (the limit: {_number(verdict.ceiling)})"
    met = {None: "-", True: "[green]yes[/]", False: "[yellow]no[/]"}[verdict.met]
    return verdict.floor.title, f"{sign} {_number(verdict.floor.limit)}", value, met


def print_report(outcome: Outcome, console: Console) -> None:
    """Print the whole outcome.

    Args:
        outcome: what a run found.
        console: where to.
    """
    from rich.table import Table

    machine: Any = outcome.machine
    disk = machine["file_system"]
    console.print(
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_bytes'] >> 30} GiB, "
        f"Linux {machine['kernel']}, {disk['type']} on {disk['device']}, "
        f"Python {machine['python']}, load {machine['load_average_1min']:.1f} at the start; "
        f"{outcome.settings.nbytes / (1 << 30):.3g} GiB, medians of "
        f"{outcome.settings.rounds} interleaved rounds",
        highlight=False,
    )
    for section in outcome.sections:
        console.print(_section_table(section))
    table = Table(title="Promises", title_justify="left", title_style="bold")
    table.add_column("ratio within this run")
    table.add_column("floor", justify="right")
    table.add_column("measured", justify="right")
    table.add_column("met")
    for verdict in outcome.verdicts:
        table.add_row(*_floor_row(verdict))
    console.print(table)
    if not outcome.correct:
        console.print("[bold red]Some contender's bytes differ from the source: see above.[/]")
