"""The command line's own part: tables, JSON, messages."""

import io
import json
import sys
import types

import click
import pytest
from click.testing import CliRunner
from rich.console import Console

from stratacl_jax import cli
from stratacl_jax.runtime.config import Config
from stratacl_jax.runtime.errors import PeerLost

FACTS = {
    "version": "0.1",
    "initialized": False,
    "host": {"cores": 2, "quota": None, "flags": ["avx2", "f16c"]},
    "arena": {"span": 1 << 36, "pages": {"huge": True}},
    "peers": [],
    "settings": Config({}).describe(),
}


@pytest.fixture
def world(monkeypatch):
    module = types.ModuleType("stratacl_jax.runtime.world")
    module.info = lambda: FACTS
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr("stratacl_jax.runtime.world", module, raising=False)
    return module


def test_info_as_json(world):
    result = CliRunner().invoke(cli.stratacl, ["info", "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.output) == FACTS


def test_info_as_tables(world):
    result = CliRunner().invoke(cli.stratacl, ["info"])
    assert result.exit_code == 0, result.output
    assert "host" in result.output and "settings" in result.output


def test_ledger_of_two_ranks():
    result = CliRunner().invoke(cli.stratacl, ["info", "--ledger", "--json"])
    assert result.exit_code == 0, result.output
    ledger = json.loads(result.output)["ledger"]
    assert ledger["operations"] == 100
    assert ledger["direct_bytes"] == 100 << 20 and ledger["staged_bytes"] == 0
    for name in ("registered_bytes", "ready_share", "remaps", "first_use_gap_min_s"):
        assert name in ledger


def test_tables_show_every_value():
    text = io.StringIO()
    cli.print_facts(FACTS, Console(file=text, width=200))
    shown = text.getvalue()
    for part in ("avx2, f16c", "68719476736", "pages · huge", "STRATACL_TIMEOUT"):
        assert part in shown
    for setting in FACTS["settings"]:
        assert setting["env"] in shown and setting["origin"] in shown


def lazy(module: str) -> click.Group:
    group = click.Group()
    group.add_command(cli._LazyCommand("demo", module, "main_command", "Shows."))
    return group


def test_help_loads_nothing():
    result = CliRunner().invoke(lazy("no.such.module"), ["--help"])
    assert result.exit_code == 0 and "Shows." in result.output


def test_lazy_command_gets_its_arguments(monkeypatch):
    module = types.ModuleType("some_demo")

    @click.command()
    @click.option("--steps", type=int)
    def main_command(steps):
        click.echo(f"{steps} steps")

    module.main_command = main_command
    monkeypatch.setitem(sys.modules, "some_demo", module)
    result = CliRunner().invoke(lazy("some_demo"), ["demo", "--steps", "3"])
    assert result.output == "3 steps\n", result.output


def test_missing_package_is_named(tmp_path, monkeypatch):
    (tmp_path / "needy.py").write_text("import no_such_package.part")
    monkeypatch.syspath_prepend(tmp_path)
    result = CliRunner().invoke(lazy("needy"), ["demo", "--steps", "3"])
    assert result.exit_code == 1
    assert "needs the package no_such_package" in result.output


def test_missing_part_of_our_own():
    result = CliRunner().invoke(lazy("stratacl_jax.no_such_part"), ["demo"])
    assert result.exit_code == 1 and "could not be loaded" in result.output


def test_errors_of_the_package_are_one_line(world, monkeypatch, capsys):
    def info():
        raise PeerLost("rank 1 is gone")

    world.info = info
    monkeypatch.setattr(sys, "argv", ["stratacl", "info"])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 1
    assert capsys.readouterr().err == "stratacl: PeerLost: rank 1 is gone\n"
