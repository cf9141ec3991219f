"""The shared fixtures themselves: databases are fresh, cloned from one that has our migrations."""

from spur_events import postgres as border
from spur_events import settings


def _tables(url: str) -> set[str]:
    with border.connect(settings.Database.model_validate({"url": url})) as connection:
        rows = connection.execute(
            "SELECT table_schema || '.' || table_name AS name FROM information_schema.tables"
            " WHERE table_schema NOT IN ('pg_catalog', 'information_schema')"
        )
        return {row["name"] for row in rows}


def test_an_empty_database_is_empty_and_a_database_has_our_tables(
    empty_database_url: str, database_url: str
) -> None:
    assert _tables(empty_database_url) == set()
    assert {"public.accounts", "public.users"} <= _tables(database_url)


def test_labels_differ(unique: str) -> None:
    assert unique.isalnum()
    assert unique == unique.lower()
