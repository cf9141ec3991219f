-- A row that row security hides from this role must not look like a member who left: then the memberships,
-- which the triggers keep, say who is there.
SELECT coalesce(people.account, kept.account) AS account,
       coalesce(people.name, kept.user_name) AS name,
       coalesce(people.default_account IS NOT NULL, false) AS is_default,
       coalesce(kept.generation, '') AS generation
FROM (SELECT account, name, default_account FROM users WHERE account = ANY(%(names)s)) AS people
FULL JOIN (SELECT account, user_name, generation FROM spur_events.memberships WHERE account = ANY(%(names)s)) AS kept
       ON kept.user_name = people.name AND kept.account = people.account
WHERE people.name IS NOT NULL OR row_security_active('users')
ORDER BY 1, 2
