SELECT name FROM accounts UNION SELECT account FROM spur_events.tombstones
