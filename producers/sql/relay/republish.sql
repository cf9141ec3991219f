-- Accounts with a change under way are published by that change.
INSERT INTO spur_events.outbox (account, kind, database_user, application)
SELECT name, 'republished', session_user, 'spur-events relay'
FROM unnest(%(names)s::text[]) AS wanted(name)
WHERE NOT EXISTS (SELECT FROM spur_events.outbox WHERE outbox.account = wanted.name)
