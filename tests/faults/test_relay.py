"""The relay against what other sessions do to it at the worst moment."""

import pytest
from support import pipeline

from spur_events import postgres
from spur_events.local.nats import Nats


async def test_a_deletion_under_a_batch_costs_one_more_try_and_not_the_lead(
    database_url: str, nats_server: Nats, caplog: pytest.LogCaptureFixture
) -> None:
    """A relay that leads anew reads the whole database and the whole bucket: too much for one conflict."""
    caplog.set_level("INFO", "spur_events.producers.relay")
    config = pipeline.config(database_url, nats_server)
    async with pipeline.relay(config) as (_, bus):
        pipeline.execute(config, "INSERT INTO accounts (name, grp_tres) VALUES ('bio', 'cpu=4')")
        await pipeline.eventually(lambda: pipeline.state(bus, "bio"), "bio is published")
        await pipeline.published(config)
        with postgres.connect(config.database) as writer, writer.transaction():
            # What the deletion of the account does in its trigger; the account itself would hold the update up.
            writer.execute("DELETE FROM spur_events.allocations WHERE account = 'bio'")
            pipeline.execute(config, "UPDATE accounts SET grp_tres = NULL WHERE name = 'bio'")

            async def stuck() -> bool:
                row = writer.execute(
                    "SELECT count(*) AS n FROM pg_stat_activity WHERE datname = current_database()"
                    " AND application_name = 'spur-events relay' AND wait_event_type = 'Lock'"
                ).fetchone()
                return row is not None and row["n"] == 1

            await pipeline.eventually(stuck, "the relay's batch waits for the writer")

        await pipeline.published(config)
    told = [record.message for record in caplog.records]
    assert "batch met a writer and is taken again" in told
    assert told.count("relay leads") == 1
