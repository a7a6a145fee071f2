"""The command line, `stratacl`.

Each command is thin: it turns arguments into a call and a result into text.
`demo` and `bench` are loaded when they are asked for, as they need more than the
package itself does.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import click
from rich import box
from rich.console import Console
from rich.table import Table

from .runtime.errors import InvalidUsage, StrataError


class _LazyCommand(click.Command):
    """A command that lives in another module, imported when it is run."""

    def __init__(self, name: str, module: str, attribute: str, help: str):
        super().__init__(name, help=help, add_help_option=False)
        self._module = module
        self._attribute = attribute

    def _load(self) -> click.Command:
        try:
            module = importlib.import_module(self._module)
            return getattr(module, self._attribute)
        except (ImportError, AttributeError) as error:
            package = (getattr(error, "name", "") or "").partition(".")[0]
            if isinstance(error, AttributeError) or package in ("", __package__):
                raise click.ClickException(
                    f"`stratacl {self.name}` could not be loaded: {error}"
                ) from error
            raise click.ClickException(
                f"`stratacl {self.name}` needs the package {package}, which is not "
                f"installed here: pip install {package}"
            ) from error

    def make_context(
        self,
        info_name: str | None,
        args: list[str],
        parent: click.Context | None = None,
        **extra: Any,
    ) -> click.Context:
        return self._load().make_context(info_name, args, parent, **extra)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def stratacl() -> None:
    """Collectives at memory speed for JAX on CPU hosts."""


@stratacl.command(
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False}
)
@click.option(
    "-n",
    "--processes",
    type=click.IntRange(min=1),
    required=True,
    help="Number of processes to start on this host.",
)
@click.option(
    "-d",
    "--devices-per-process",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="JAX CPU devices (ranks) in each process.",
)
@click.option("-m", "--module", is_flag=True, help="Run a module, as in `python -m`.")
@click.option(
    "--grace",
    type=click.FloatRange(min=0),
    default=5.0,
    show_default=True,
    metavar="SECONDS",
    help="How long the others may still report what they saw after a failure.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help="End the whole job after this time, with exit code 124.",
)
@click.option(
    "--label/--no-label",
    default=True,
    show_default=True,
    help="Write [rank] before each line; without it output goes straight through.",
)
@click.argument("program", metavar="SCRIPT [ARGS]...")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="")
def launch(program: str, arguments: tuple[str, ...], **options: Any) -> None:
    """Start the ranks of a JAX program on this host.

    The program needs no change: JAX finds itself distributed over the ranks. Its
    own jax.distributed.initialize() is welcome and has nothing left to do.

    The first rank that fails ends the job with its exit code (128 + the number of
    a signal). SIGINT, SIGTERM and SIGHUP are passed on; a second one ends all ranks
    at once. The ranks' standard input is empty.
    """
    from . import launch as launcher

    sys.exit(launcher.run(launcher.Options((program, *arguments), **options)))


@stratacl.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
@click.option(
    "--ledger",
    is_flag=True,
    help="Run collectives on two ranks for a second and show what moved, and how.",
)
def info(as_json: bool, ledger: bool) -> None:
    """Show versions, host, ranks, memory plan and every setting in force."""
    from .runtime import selfcheck, world

    facts = {"ledger": selfcheck.measure()} if ledger else world.info()
    if as_json:
        click.echo(json.dumps(facts, indent=2))
    else:
        print_facts(facts, Console(soft_wrap=False))


for _command in (
    _LazyCommand(
        "demo",
        "stratacl_jax.demo.cli",
        "demo",
        "Train a small language model on our collectives and on stock JAX.",
    ),
    _LazyCommand(
        "bench",
        "stratacl_jax.bench.cli",
        "bench",
        "Time collectives against stock JAX, in nccl-tests' columns.",
    ),
):
    stratacl.add_command(_command)


def print_facts(facts: Mapping[str, Any], console: Console) -> None:
    """Prints a dictionary of facts as tables, one for each section.

    Args:
      facts: values are scalars (gathered in a first table), mappings (one table
        each), or lists of mappings with equal keys (one table, a column a key).
      console: where to print.
    """
    scalars = {k: v for k, v in facts.items() if not _is_section(v)}
    if scalars:
        console.print(_pairs("", scalars))
    for title, value in facts.items():
        if isinstance(value, Mapping):
            console.print(_pairs(title, value))
        elif _is_section(value):
            console.print(_records(title, value))


def _is_section(value: Any) -> bool:
    if isinstance(value, Mapping):
        return True
    return (
        isinstance(value, Sequence)
        and not isinstance(value, str)
        and len(value) > 0
        and all(isinstance(item, Mapping) for item in value)
    )


def _table(title: str) -> Table:
    return Table(
        title=title.replace("_", " ") or None,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
    )


def _pairs(title: str, values: Mapping[str, Any]) -> Table:
    table = _table(title)
    table.show_header = False
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _flat(values):
        table.add_row(name, value)
    return table


def _flat(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    rows = []
    for name, value in values.items():
        name = prefix + str(name).replace("_", " ")
        if isinstance(value, Mapping):
            rows += _flat(value, name + " · ")
        else:
            rows.append((name, _text(value)))
    return rows


def _records(title: str, records: Sequence[Mapping[str, Any]]) -> Table:
    table = _table(title)
    for index, name in enumerate(records[0]):
        table.add_column(
            str(name).replace("_", " "),
            style="cyan" if index == 0 else None,
            no_wrap=index == 0,
            overflow="fold",
        )
    for record in records:
        table.add_row(*(_text(record.get(name)) for name in records[0]))
    return table


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return ", ".join(_text(item) for item in value) or "-"
    return str(value)


def main() -> None:
    """Entry point; errors of the package become one line, not a traceback."""
    try:
        stratacl(prog_name="stratacl")
    except StrataError as error:
        click.echo(f"stratacl: {type(error).__name__}: {error}", err=True)
        sys.exit(2 if isinstance(error, InvalidUsage) else 1)
