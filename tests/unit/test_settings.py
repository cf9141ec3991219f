"""Settings from the environment and a file, and what is said about wrong ones."""

from pathlib import Path

import pytest

from spur_events import errors, settings


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import os

    for name in [name for name in os.environ if name.startswith("SPUR_EVENTS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(settings, "DEFAULT_CONFIG", tmp_path / "absent.toml")


def test_every_setting_has_a_default() -> None:
    assert settings.load() == settings.Settings()
    assert settings.load().nats.partitions == 16


def test_the_environment_names_group_and_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPUR_EVENTS_DATABASE_URL", "postgresql://db/x")
    monkeypatch.setenv("SPUR_EVENTS_DATABASE_CONNECT_TIMEOUT_S", "7")
    monkeypatch.setenv("SPUR_EVENTS_QUOTA_GPU_TYPES", '{"a100": "nvidia.com/gpu"}')
    monkeypatch.setenv("SPUR_EVENTS_KUBERNETES_KUBECONFIG", "/x/y")
    loaded = settings.load()
    assert loaded.database.url.get_secret_value() == "postgresql://db/x"
    assert loaded.database.connect_timeout_s == 7
    assert loaded.quota.gpu_types == {"a100": "nvidia.com/gpu"}
    assert loaded.kubernetes.kubeconfig == Path("/x/y")


def test_the_environment_wins_over_the_file_setting_by_setting(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "config.toml"
    file.write_text(
        '[nats]\nurl = "nats://file:1"\npartitions = 4\n[quota.gpu_types]\na100 = "nvidia.com/gpu"\n'
    )
    monkeypatch.setenv("SPUR_EVENTS_CONFIG", str(file))
    monkeypatch.setenv("SPUR_EVENTS_NATS_URL", "nats://environment:1")
    loaded = settings.load()
    assert loaded.nats.url == "nats://environment:1"
    assert loaded.nats.partitions == 4
    assert loaded.quota.gpu_types == {"a100": "nvidia.com/gpu"}


@pytest.mark.parametrize(
    ("variable", "value", "told"),
    [
        ("SPUR_EVENTS_NATS_PARTITIONS", "many", "nats.partitions"),
        ("SPUR_EVENTS_NATS_PARTITIONS", "0", "nats.partitions"),
        ("SPUR_EVENTS_NATS_PARTITIONS", "257", "nats.partitions"),
        ("SPUR_EVENTS_RELAY_POLL_INTERVAL_S", "-1", "relay.poll_interval_s"),
        ("SPUR_EVENTS_APPLY_ACK_WAIT_S", "nan", "apply.ack_wait_s"),
        ("SPUR_EVENTS_KUBERNETES_CLUSTER", "West Side", "lower-case label"),
        ("SPUR_EVENTS_KUBERNETES_CLUSTER", "relay", "not 'relay'"),
        ("SPUR_EVENTS_QUOTA_MODE", "all", "quota.mode"),
        ("SPUR_EVENTS_QUOTA_GPU_RESOURCE", "gpu", "amd.com/gpu"),
        ("SPUR_EVENTS_QUOTA_GPU_TYPES", '{"a100": "gpu"}', "amd.com/gpu"),
    ],
)
def test_a_bad_value_is_told_with_its_environment_variable(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, told: str
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(errors.MisconfiguredError) as caught:
        settings.load()
    assert variable in str(caught.value)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_value_that_is_no_json_is_one_line_that_names_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPUR_EVENTS_QUOTA_GPU_TYPES", "a100=x")
    with pytest.raises(errors.MisconfiguredError, match=r"(?i)quota") as caught:
        settings.load()
    assert "\n" not in str(caught.value)


def test_an_unknown_setting_of_a_group_is_told_with_its_environment_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SPUR_EVENTS_NATS_ADDRESS", "x")
    with pytest.raises(errors.MisconfiguredError, match="SPUR_EVENTS_NATS_ADDRESS"):
        settings.load()


@pytest.mark.parametrize("text", ['[nats]\nadress = "x"\n', '[nuts]\nurl = "x"\n'])
def test_an_unknown_key_of_the_file_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str
) -> None:
    file = tmp_path / "config.toml"
    file.write_text(text)
    monkeypatch.setenv("SPUR_EVENTS_CONFIG", str(file))
    with pytest.raises(errors.MisconfiguredError, match=r"nats\.adress|nuts"):
        settings.load()


def test_a_file_that_is_not_there_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SPUR_EVENTS_CONFIG", str(tmp_path / "nowhere.toml"))
    with pytest.raises(errors.MisconfiguredError, match=r"nowhere\.toml"):
        settings.load()


def test_a_file_that_is_no_toml_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text("[nats\nurl")
    monkeypatch.setenv("SPUR_EVENTS_CONFIG", str(file))
    with pytest.raises(errors.MisconfiguredError, match=r"config\.toml") as caught:
        settings.load()
    assert "\n" not in str(caught.value)


def test_passwords_are_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPUR_EVENTS_DATABASE_URL", "postgresql://u:hunter2@db/x")
    monkeypatch.setenv("SPUR_EVENTS_NATS_PASSWORD", "hunter2")
    assert "hunter2" not in repr(settings.load())
    monkeypatch.setenv("SPUR_EVENTS_DATABASE_CONNECT_TIMEOUT_S", "x")
    with pytest.raises(errors.MisconfiguredError) as caught:
        settings.load()
    assert "hunter2" not in str(caught.value)


def test_a_list_that_is_no_json_names_its_variable_and_not_its_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPUR_EVENTS_AUTH_ADMINS", "s3cret")
    with pytest.raises(errors.MisconfiguredError, match="SPUR_EVENTS_AUTH_ADMINS must be JSON") as caught:
        settings.load()
    assert "s3cret" not in str(caught.value)


def test_an_empty_variable_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPUR_EVENTS_NATS_CREDENTIALS", "")
    monkeypatch.setenv("SPUR_EVENTS_NATS_PARTITIONS", "")
    assert settings.load() == settings.Settings()
