SELECT DISTINCT account FROM spur_events.outbox
