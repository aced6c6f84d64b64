"""`tilebeam doctor`: prints what `tilebeam.measure.doctor` found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from tilebeam.cli import console
from tilebeam.cli.options import Json

if TYPE_CHECKING:
    from tilebeam.measure.doctor import DoctorReport


def doctor(
    model: Annotated[
        Path | None, typer.Option("-m", "--model", help="A GGUF file: also load it, and show where its matrices run.")
    ] = None,
    json_: Json = False,
) -> None:
    """Check the installation: versions, ABI, plugin, devices, kernels (each against a reference), and a model.

    Exit code 1 if something is wrong; it then says what to do.
    """
    from tilebeam.measure.doctor import examine

    report = examine(model)
    if json_:
        print(json.dumps(report.as_dict(), indent=2))
    else:
        _show(report, console.out())
    if not report.healthy:
        raise typer.Exit(1)


def _show(report: DoctorReport, screen: Console) -> None:
    """Print the checks as a table, the kernels in use, where a model's weight matrices run, and what to do."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(ratio=1)
    said: set[str] = set()
    for check in report.checks:
        mark = Text("ok", "bold green") if check.ok else Text("FAIL", "bold red")
        table.add_row(mark, check.name, Text("for the same reason" if check.detail in said else check.detail))
        said.add(check.detail)
    screen.print(table)
    in_use = [k for k in report.facts.get("kernels", []) if k["isa"] == report.facts.get("kernel_set_in_use")]
    if in_use:
        names: dict[str, list[str]] = {}
        for kernel in in_use:
            if kernel["kernel"]:
                names.setdefault(kernel["kernel"], []).append(kernel["op"].split(",")[0])
        screen.print("\nkernels in use")
        rows = Table.grid(padding=(0, 2))
        for name, ops in names.items():
            rows.add_row(name, Text(", ".join(dict.fromkeys(op.removeprefix("mul_mat ") for op in ops)), "dim"))
        screen.print(Padding(rows, (0, 0, 0, 2)))
    for name, value in report.facts.get("environment", {}).items():
        screen.print(f"{name}={value}", style="dim", markup=False)
    if "model" in report.facts:
        from tilebeam.gguf.inspection import matrix_table
        from tilebeam.gguf.matrices import MatrixGroup

        model = report.facts["model"]
        screen.print("\nweight matrices")
        screen.print(Padding(matrix_table(MatrixGroup(**group) for group in model["matrices"]), (0, 0, 0, 2)))
        if model["warning"]:
            screen.print(Text(model["warning"], "yellow"))
    broken = [c for c in report.checks if not c.ok]
    if not broken:
        screen.print(Text("\nEverything works.", "bold green"))
        return
    screen.print()
    # The first failure is usually the cause of the others.
    screen.print(Text.assemble((f"{broken[0].name}: ", "bold red"), broken[0].advice))
