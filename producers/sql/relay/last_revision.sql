SELECT CASE WHEN is_called THEN last_value ELSE 0 END AS number FROM spur_events.revision
