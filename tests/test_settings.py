"""Settings: precedence, origins, types, and errors that help."""
from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest
from isthmus.core import env
from isthmus.core.cli.main import main
from isthmus.core.cli.run import MAX_MESSAGE
from isthmus.core.config import Config, size_bytes
from isthmus.core.errors import ConfigError
from isthmus.core.scheduler import SCHEDULE_POLICIES
from isthmus.core.scheduler.policy import POLICIES, FirstComeFirstServed
from isthmus.core.settings import (
    check_platform,
    list_settings,
    read_environment,
    resolve,
    shown,
    suggest,
    unknown_variables,
    value_of,
)


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_every_field_of_every_group_is_a_setting_with_help_and_a_checkable_default():
    settings = list_settings()
    names = [f.name for group in fields(Config) for f in fields(type(getattr(Config(), group.name)))]
    assert sorted(names) == sorted(settings), "names must be unique over the groups"
    assert len(names) < 80
    for setting in settings.values():
        assert len(setting.meta("help")) > 5, setting.name
        default = value_of(Config(), setting)
        assert default is not None or setting.optional, setting.name
        assert default is None or isinstance(default, setting.type), setting.name


def test_later_sources_win_and_each_value_knows_who_set_it(tmp_path):
    file = write(tmp_path / "c.yaml", "port: 1001\nhost: 1.1.1.1\nserver: {max_n: 7}\nmodel: {dtype: float32}\n")
    environment = {"ISTHMUS_PORT": "1002", "ISTHMUS_HOST": "2.2.2.2"}
    found = resolve({"port": "1003"}, environment, file)
    server = found.config.server
    assert (server.port, server.host, server.max_n, found.config.model.dtype) == (1003, "2.2.2.2", 7, "float32")
    assert found.origin["port"] == "command line"
    assert found.origin["host"] == "environment ISTHMUS_HOST"
    assert found.origin["max_n"] == f"file {file}"
    assert found.origin["log_level"] == "default"
    assert resolve({}, {}).config == Config()


def test_the_file_may_be_named_by_the_environment(tmp_path):
    file = write(tmp_path / "c.yaml", "port: 1001")
    assert resolve({}, {"ISTHMUS_CONFIG": str(file)}).config.server.port == 1001


@pytest.mark.parametrize("text, group, name, value", [
    ("model: org/name", "model", "model", "org/name"),
    ("model: {model: org/name, served-model-name: 7}", "model", "served_model_name", "7"),
    ("platform: cpu", "platform", "platform", "cpu"),
    ("platform: {platform-option: [threads=8, a=b]}", "platform", "platform_option", ("threads=8", "a=b")),
    ("platform-option: {threads: 8, check: true, note: x}", "platform", "platform_option",
     ("threads=8", "check=true", "note=x")),
    ("prefix-cache: off", "cache", "prefix_cache", False),
    ("max_model_len: null", "model", "max_model_len", None),
    ("kv_cache_memory: 4GiB", "cache", "kv_cache_memory", "4GiB"),
    ("waiting_timeout: 3", "scheduler", "waiting_timeout", 3.0),
    ("", "server", "port", 8000),
])
def test_yaml_keys_stand_flat_or_in_groups(tmp_path, text, group, name, value):
    config = resolve({}, {}, write(tmp_path / "c.yaml", text)).config
    assert getattr(getattr(config, group), name) == value


@pytest.mark.parametrize("text, words", [
    ("prot: 1", ["'prot'", "did you mean port?"]),
    ("server: {prt: 1}", ["'prt' in server", "did you mean port?"]),
    ("model: {port: 1}", ["'port' in model"]),
    ("sever: {port: 1}", ["'sever'", "did you mean server?"]),
    ("[1]", ["list"]),
    ("port: 1\na: [\n", ["c.yaml, line 3, column 1: expected the node content"]),
    ("a: \x01", ["c.yaml is not YAML: special characters are not allowed"]),
    ("port: 1\nhost: a\nport: 2", ["c.yaml, line 3, column 1: port is set twice"]),
    ("server:\n  port: 1\n  port: 2", ["line 3, column 3: port is set twice"]),
    ("max-n: 1\nmax_n: 2", ["c.yaml: max_n is set twice"]),
    ("port: 1\nserver: {port: 2}", ["c.yaml: port is set twice"]),
    ("platform-option: {threads: null}", ["c.yaml: platform_option: {'threads': None} is not a list of texts"]),
    ("eviction-policy: fifo", ["c.yaml: eviction_policy: 'fifo' is not one of arc, learned, lfu, lru, priority, ",
                               "slru, ttl"]),
    ("[" * 60_000, ["c.yaml is nested too deeply"]),
    ("#" * 70_000, ["c.yaml: the file has more than 65536 characters"]),
    ("max-running-requests: 1000000000", ["max_running_requests: 1000000000 is out of range"]),
    ("port: true", ["port: 'true' is not a whole number"]),
    ("port: 1.5", ["1.5"]),
    ("!!python/object/apply:os.getcwd []", ["could not determine a constructor"]),
])
def test_a_wrong_file_is_refused_with_the_word_at_fault(tmp_path, text, words):
    with pytest.raises(ConfigError) as caught:
        resolve({}, {}, write(tmp_path / "c.yaml", text))
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value) and "<unicode string>" not in str(caught.value)


def test_all_that_is_wrong_is_told_at_once(tmp_path):
    with pytest.raises(ConfigError) as caught:
        file = write(tmp_path / "c.yaml", "port: 1.5\ndtype: fp8\nhost: a")
        resolve({"page_size": "0"}, {"ISTHMUS_MAX_N": "x"}, file)
    lines = [line.strip() for line in str(caught.value).splitlines()]
    assert len(lines) == 4 and "port: '1.5' is not" in lines[0] and "dtype: 'fp8'" in lines[1]
    assert lines[2].startswith("ISTHMUS_MAX_N: 'x'") and lines[3].startswith("--page-size: 0")
    with pytest.raises(ConfigError) as caught:
        resolve({}, {}, write(tmp_path / "d.yaml", "prot: 1\nhots: a\nmax-n: 1\nmax_n: 2"))
    assert len(str(caught.value).splitlines()) == 3


@pytest.mark.parametrize("name, value, words", [
    ("port", "99999", "--port: 99999 is out of range, it must be between 0 and 65535"),
    ("port", "8k", "--port: '8k' is not a whole number"),
    ("max_running_requests", "0", "between 1 and 8192"),
    ("page_size", "0", "at least 1"),
    ("dtype", "float23", "did you mean float32?"),
    ("schedule_policy", "lmp", "--schedule-policy: 'lmp' is not one of deadline, dfs-weight, fair, fcfs, lpm, "
     "priority, shortest-first; did you mean lpm?"),
    ("eviction_policy", "foo", "--eviction-policy: 'foo' is not one of arc, learned, lfu, lru, priority, slru, ttl"),
    ("kv_cache_memory", "4 potatoes", "--kv-cache-memory: '4 potatoes' is not a size"),
    ("waiting_timeout", "-1", "at least 0"),
    ("waiting_timeout", "nan", "'nan' is not a number"),
    ("strict", "maybe", "'maybe' is not true or false"),
    ("max_body", "0", "--max-body: 0 is out of range, it must be at least 1024"),
    ("max_body", "1023B", "at least 1024"),
    ("host", "", "--host is set, but holds no address"),
    ("host", "  ", "holds no address"),
    ("api_key", "", "--api-key is set, but holds no key"),
    ("api_key", " ,, ", "--api-key is set, but holds no key"),
    ("model", "/m/na\udcffme.gguf", "is no UTF-8, so that no answer can name it: rename it, or make a link"),
    ("lora", "a=/m/\udcff", "is no UTF-8"),
])
def test_a_wrong_value_names_the_flag_and_what_is_allowed(name, value, words):
    with pytest.raises(ConfigError) as caught:
        resolve({name: value}, {})
    assert words in str(caught.value)


def test_a_wrong_variable_is_named():
    with pytest.raises(ConfigError, match="ISTHMUS_PORT: 'x' is not a whole number"):
        resolve({}, {"ISTHMUS_PORT": "x"})
    with pytest.raises(ConfigError, match="ISTHMUS_CONFIG=/nowhere.yaml: there is no such file"):
        resolve({}, {"ISTHMUS_CONFIG": "/nowhere.yaml"})


def test_a_key_that_is_none_is_refused_wherever_it_is_set(tmp_path):
    """It would mean a server without a lock for somebody who asked for one."""
    with pytest.raises(ConfigError, match="ISTHMUS_API_KEY is set, but holds no key"):
        resolve({}, {"ISTHMUS_API_KEY": " ,, "})
    for value in ('""', "' , '", "", "~", "null"):
        with pytest.raises(ConfigError, match="api_key is set, but holds no key"):
            resolve({}, {}, write(tmp_path / "c.yaml", f"api_key: {value}"))
        with pytest.raises(ConfigError, match="api_key is set, but holds no key"):
            resolve({}, {}, write(tmp_path / "c.yaml", f"server: {{api_key: {value}}}"))
    with pytest.raises(ConfigError, match="ISTHMUS_API_KEY is set, but holds no key"):
        resolve({}, {"ISTHMUS_API_KEY": ""})
    assert resolve({"api_key": "k"}, {"ISTHMUS_API_KEY": ""}).config.server.api_key == "k"
    for key in ("k", " k", ",k,"):
        assert resolve({}, {"ISTHMUS_API_KEY": key}).config.server.api_key == key


@pytest.mark.parametrize("key", ["0123", "12:30:45", "1_000", "0x10", "1e3", "2024-01-01", "true", "off", "1.10",
                                 ".inf", "=", "<<"])
def test_a_text_is_taken_as_it_was_written(tmp_path, key):
    """YAML by itself reads the key 0123 as the number 83."""
    text = f"api_key: {key}\nmodel: {{served_model_name: {key}}}"
    config = resolve({}, {}, write(tmp_path / "c.yaml", text)).config
    assert (config.server.api_key, config.model.served_model_name) == (key, key)


@pytest.mark.parametrize("text", [
    "a: &a [x, x]\nb: &b [*a, *a]\n" + "\n".join(f"c{i}: &c{i} [{', '.join([f'*c{i - 1}' if i else '*b'] * 9)}]"
                                                 for i in range(12)) + "\nplatform_option: *c11",
    "platform_option: &f [*f]", "a: &a {x: 1}\n" + "\n".join(
        f"b{i}: &b{i} {{<<: [{', '.join([f'*b{i - 1}' if i else '*a'] * 9)}]}}" for i in range(12)),
    "!!merge <<: {port: 1}", f"port: {'9' * 60_000}", f"dtype: {'x' * 60_000}", f"{'x' * 60_000}: 1",
    f"max_body: {'9' * 60_000}", f"{'x' * 30_000}: 1\n{'x' * 30_000}: 1"], ids=range(9))
def test_no_file_makes_a_long_message_or_long_work(tmp_path, capsys, text):
    file = write(tmp_path / "c.yaml", text)
    with pytest.raises(ConfigError):
        resolve({}, {}, file)
    assert main(["explain", "--config", str(file)]) == 2
    assert len(capsys.readouterr().err) < MAX_MESSAGE + 100


def test_an_empty_variable_is_an_unset_one(tmp_path):
    file = write(tmp_path / "c.yaml", "port: 1001\napi_key: k")
    found = resolve({}, {"ISTHMUS_PORT": "", "ISTHMUS_API_KEY": "", "ISTHMUS_CONFIG": ""}, file)
    assert (found.config.server.port, found.config.server.api_key) == (1001, "k")
    assert found.origin["port"] == f"file {file}"
    assert resolve({}, {"ISTHMUS_PORT": "", "ISTHMUS_CONFIG": ""}).config == Config()


def test_whoever_registers_a_policy_can_choose_it(monkeypatch):
    assert SCHEDULE_POLICIES == tuple(POLICIES)
    monkeypatch.setitem(POLICIES._entries, "newest", FirstComeFirstServed)
    assert list_settings()["schedule_policy"].choices == tuple(sorted([*POLICIES]))
    assert resolve({"schedule_policy": "newest"}, {}).config.scheduler.schedule_policy == "newest"


@pytest.mark.parametrize("flags, environment, words", [
    ({"platform": "CPU"}, {}, "--platform CPU: no such platform is installed; did you mean cpu?; there are: "),
    ({"platform": "nul"}, {}, "did you mean null?"),
    ({}, {"ISTHMUS_PLATFORM": "abacus"}, "--platform abacus (environment ISTHMUS_PLATFORM): no such platform"),
])
def test_a_platform_that_is_not_there_is_noticed_before_anything_is_loaded(flags, environment, words):
    with pytest.raises(ConfigError) as caught:
        check_platform(resolve(flags, environment))
    assert words in str(caught.value) and "`isthmus doctor`" in str(caught.value)
    check_platform(resolve({}, {}))
    check_platform(resolve({"platform": "reference"}, {}))


def test_lists_from_the_environment_are_split_at_commas():
    assert resolve({}, {"ISTHMUS_PLATFORM_OPTION": "a=1, b=2"}).config.platform.platform_option == ("a=1", "b=2")


def test_the_variable_that_kubernetes_sets_for_a_service_named_isthmus_is_not_taken_for_a_setting():
    assert read_environment({"ISTHMUS_PORT": "tcp://10.0.0.1:8000"}) == {}


def test_variables_that_look_like_settings_are_warned_about():
    assert unknown_variables({"ISTHMUS_PROT": "1", "ISTHMUS_PORT": "1", "ISTHMUS_DEBUG": "1", "PATH": "x"}) == [
        "ISTHMUS_PROT is not a setting; did you mean ISTHMUS_PORT?"]


def test_secrets_are_not_shown():
    config = resolve({"api_key": "hunter2"}, {}).config
    assert config.server.api_key == "hunter2"
    assert "hunter2" not in shown(config, list_settings()["api_key"])


@pytest.mark.parametrize("text, value", [("16MiB", 16 * 2**20), ("4 GB", 4 * 10**9), ("1.5kib", 1536), ("7", 7)])
def test_sizes(text, value):
    assert size_bytes(text) == value


@pytest.mark.parametrize("text", ["", "GiB", "-1", "4 G i B", "1e9", "4GiB4"])
def test_what_is_not_a_size(text):
    with pytest.raises(ValueError, match="is not a size"):
        size_bytes(text)


def test_every_variable_that_is_no_setting_is_documented(monkeypatch):
    assert all(f"| {name} " in env.__doc__ for name in env.VARIABLES)
    monkeypatch.setenv("ISTHMUS_DEBUG", "3")
    assert env.debug_level() == 3
    monkeypatch.setenv("ISTHMUS_DEBUG", "very")
    assert env.debug_level() == 0
    monkeypatch.setenv("ISTHMUS_CACHE", "~/somewhere")
    assert env.cache_dir() == Path.home() / "somewhere"


def test_suggestions_need_some_likeness():
    assert suggest("prot", ["port"]) == "; did you mean port?"
    assert suggest("zebra", ["port"]) == ""
    assert suggest("PROT", ["Port"]) == "; did you mean Port?"


@pytest.mark.parametrize("word, canonical", [("bf16", "bfloat16"), ("BF16", "bfloat16"), ("f32", "float32"),
                                             ("fp32", "float32"), ("float32", "float32"), ("bfloat16", "bfloat16"),
                                             ("fp16", "float16"), ("f16", "float16")])
def test_other_words_for_a_dtype_are_taken_and_shown_as_the_one(word, canonical):
    resolved = resolve({"dtype": word}, {})
    assert resolved.config.model.dtype == canonical == shown(resolved.config, list_settings()["dtype"])
    assert resolve({}, {"ISTHMUS_DTYPE": word}).config.model.dtype == canonical
    assert resolve({"kv_cache_dtype": word}, {}).config.cache.kv_cache_dtype == canonical
