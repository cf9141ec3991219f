"""Case C49: memberships that come and go faster than events are handled, and events in any order."""

import itertools

from support import pipeline, servers
from support.site import Site

from spur_events.schemas import names, subjects
from spur_events.schemas.events import AccountChanged


async def waits_for_nothing(site: Site) -> bool:
    durables = [subjects.durable(site.cluster.name, number) for number in range(site.bus.partitions)]
    return not any([await site.bus.waiting(durable) for durable in durables])


async def test_added_removed_and_added_in_every_order(site: Site) -> None:
    await site.add("lab")
    add = "INSERT INTO users (name, account) VALUES ('alice', '$lab')"
    for statement in (add, "DELETE FROM users WHERE name = 'alice' AND account = '$lab'", add):
        site.sql(statement)
        # Each in a batch of its own: one event each.
        await pipeline.published(site.config)
    before = await site.settled("lab")
    account = await site.live("ServiceAccount", "lab", names.service_account("alice"))
    all_events = await site.bus.read_stream(
        subjects.EVENTS_STREAM,
        subjects.change(names.slug(site.name("lab")), site.bus.partitions),
        AccountChanged,
    )
    about_alice = [event for event in all_events if any(change.user for change in event.changes)]
    assert len(about_alice) == 3
    subject = subjects.change(names.slug(site.name("lab")), site.bus.partitions)
    for order in itertools.permutations(about_alice):
        for event in (*order, *order):
            await site.bus.publish(subject, event, message_id=servers.unique())
    await pipeline.eventually(lambda: waits_for_nothing(site), "every event is answered")
    after = await site.settled("lab")
    assert after.model_dump(exclude={"handled_sequence"}) == before.model_dump(exclude={"handled_sequence"})
    assert await site.live("ServiceAccount", "lab", names.service_account("alice")) == account
    assert await site.cluster.subjects(site.name("lab")) == [names.service_account("alice")]
