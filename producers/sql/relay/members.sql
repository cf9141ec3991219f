SELECT users.account, users.name, users.default_account IS NOT NULL AS is_default,
       coalesce(memberships.generation, '') AS generation
FROM users
LEFT JOIN spur_events.memberships
       ON memberships.user_name = users.name AND memberships.account = users.account
WHERE users.account = ANY(%(names)s)
ORDER BY users.account, users.name
