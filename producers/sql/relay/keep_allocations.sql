INSERT INTO spur_events.allocations (account, limits)
SELECT * FROM unnest(%(names)s::text[], %(limits)s::text[])
ON CONFLICT (account) DO UPDATE SET limits = excluded.limits WHERE allocations.limits <> excluded.limits
