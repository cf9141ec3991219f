DELETE FROM spur_events.allocations WHERE account = ANY(%(names)s)
