"""Settings: where they come from, what they accept, what messages say."""

import json
import re

import pytest

from stratacl_jax.runtime.config import Config, Setting, format_size
from stratacl_jax.runtime.errors import InvalidUsage

NAMES = list(Config.settings())


def test_defaults_and_types():
    config = Config({})
    assert config.timeout == 300.0
    assert config.warn_after == 20.0
    assert config.eager_bytes == 8192
    assert config.chunk_bytes == 256 << 10
    assert config.spin_us == -1
    assert config.inplace_us == 300
    assert config.arena_span == 64 << 30
    assert config.registration == "on_allocation"
    assert config.algorithm == "auto"
    assert config.debug == "warn" and config.debug_subsys == ""


@pytest.mark.parametrize("name", NAMES)
def test_every_default_is_a_value_that_is_accepted(name):
    setting = Config.settings()[name]
    assert isinstance(setting, Setting) and setting.doc.endswith(".")
    assert setting.env == "STRATACL_" + name.upper()
    config = Config({setting.env: str(setting.default)})
    assert getattr(config, name) == setting.default
    config.update(name, setting.default)
    assert getattr(config, name) == setting.default


@pytest.mark.parametrize(
    "name, text, value",
    [
        ("timeout", "2.5", 2.5),
        ("arena_span", "64G", 64 << 30),
        ("arena_span", "16 GiB", 16 << 30),
        ("arena_span", "1t", 1 << 40),
        ("eager_bytes", "64K", 65536),
        ("eager_bytes", "0", 0),
        ("spin_us", "-1", -1),
        ("debug", " Trace ", "trace"),
        ("debug_subsys", "fabric, Engine", "fabric,engine"),
        ("algorithm", "two_phase", "two_phase"),
        ("timeout", "", 300.0),  # set but empty is not set
    ],
)
def test_environment(name, text, value):
    config = Config({"STRATACL_" + name.upper(): text})
    assert getattr(config, name) == value


@pytest.mark.parametrize(
    "name, text",
    [
        *(("timeout", text) for text in ("0", "-1", "nan", "inf", "5 min", "1e10")),
        *(("spin_us", text) for text in ("-2", "1.5", "auto")),
        *(("arena_span", text) for text in ("1G", "-64G", "64X", "sixty", "1000T")),
        ("eager_bytes", "2M"),
        ("algorithm", "ring"),
        ("registration", "eager"),
        ("debug", "verbose"),
        ("debug_subsys", "fabric;engine"),
    ],
)
def test_bad_value_names_variable_value_and_form(name, text):
    env = "STRATACL_" + name.upper()
    config = Config({env: text})
    form = Config.settings()[name].kind.form
    with pytest.raises(InvalidUsage) as caught:
        getattr(config, name)
    for part in (env, repr(text), form):
        assert part in str(caught.value)
    with pytest.raises(InvalidUsage):
        config.freeze()
    with pytest.raises(InvalidUsage, match=re.escape(repr(text))):
        Config({}).update(name, text)


@pytest.mark.parametrize("value", [True, [], 1.5, "x"])
def test_bad_types_from_the_program(value):
    with pytest.raises(InvalidUsage):
        Config({}).update("spin_us", value)
    with pytest.raises(InvalidUsage):
        Config({}).update("arena_span", value)


def test_program_wins_over_environment_and_can_be_taken_back():
    config = Config({"STRATACL_TIMEOUT": "10"})
    config.update("timeout", 20)
    assert config.timeout == 20.0
    config.update("STRATACL_TIMEOUT", 30)
    assert config.timeout == 30.0
    config.update("timeout", None)
    assert config.timeout == 10.0


def test_a_refused_update_changes_nothing():
    config = Config({})
    config.update("timeout", 5)
    with pytest.raises(InvalidUsage):
        config.update("timeout", -5)
    assert config.timeout == 5.0


def test_unknown_setting_suggests():
    with pytest.raises(InvalidUsage, match="'timout'; did you mean timeout"):
        Config({}).update("timout", 5)


def test_attributes_are_not_assigned():
    with pytest.raises(AttributeError, match=r"config.update\('timeout', value\)"):
        Config({}).timeout = 5


def test_environment_is_read_late_until_fixed():
    env = {}
    config = Config(env)
    env["STRATACL_TIMEOUT"] = "7"
    env["STRATACL_DEBUG"] = "info"
    assert config.timeout == 7.0
    config.freeze()
    env["STRATACL_TIMEOUT"] = "8"
    env["STRATACL_DEBUG"] = "trace"
    assert config.timeout == 7.0 and config.debug == "trace"
    with pytest.raises(InvalidUsage, match=r"timeout was fixed by initialize\(\)"):
        config.update("timeout", 9)
    config.update("debug", "warn")
    assert config.debug == "warn"
    config.thaw()
    assert config.timeout == 8.0
    config.update("timeout", 9)
    assert config.timeout == 9.0


def test_describe():
    config = Config({"STRATACL_EAGER_BYTES": "4K"})
    config.update("algorithm", "one_shot")
    rows = json.loads(json.dumps(config.describe()))
    assert [row["name"] for row in rows] == NAMES
    by_name = {row["name"]: row for row in rows}
    assert all(
        set(row) == {"name", "env", "value", "default", "unit", "origin", "doc"}
        for row in rows
    )
    eager = by_name["eager_bytes"]
    assert (eager["value"], eager["origin"]) == (4096, "environment")
    assert (eager["default"], eager["unit"]) == (8192, "bytes")
    algorithm = by_name["algorithm"]
    assert (algorithm["value"], algorithm["origin"]) == ("one_shot", "program")
    assert by_name["timeout"]["origin"] == "default"


def test_unknown_variables():
    config = Config(
        {
            "STRATACL_TIMEOUT": "1",
            "STRATACL_LAUNCHED": "1",
            "STRATACL_TIMEOUTS": "1",
            "OTHER": "1",
        }
    )
    assert config.unknown_variables() == [
        "STRATACL_TIMEOUTS is set and means nothing; "
        "did you mean timeout (STRATACL_TIMEOUT)?"
    ]


@pytest.mark.parametrize(
    "size, text", [(0, "0"), (1000, "1000"), (65536, "64K"), (64 << 30, "64G")]
)
def test_format_size(size, text):
    assert format_size(size) == text
