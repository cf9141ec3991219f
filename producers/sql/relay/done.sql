DELETE FROM spur_events.outbox WHERE id = ANY(%(ids)s)
