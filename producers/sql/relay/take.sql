-- What is committed at this snapshot, in order. A row that commits later with a lower id is simply in
-- a later batch: rows leave by being deleted, never by a "last id seen".
SELECT id, account, kind, user_name, before::text AS before, after::text AS after,
       database_user, os_user, application, at
FROM spur_events.outbox ORDER BY id LIMIT %(limit)s
