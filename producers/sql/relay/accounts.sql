SELECT wanted.name, accounts.name IS NOT NULL AS present,
       accounts.description, accounts.organization, accounts.parent_account, accounts.grp_tres,
       coalesce(incarnations.incarnation, tombstones.incarnation, '') AS incarnation,
       tombstones.deleted_at, tombstones.deleted_by, allocations.limits AS last_good
FROM unnest(%(names)s::text[]) AS wanted(name)
LEFT JOIN accounts ON accounts.name = wanted.name
LEFT JOIN spur_events.incarnations ON incarnations.account = wanted.name
LEFT JOIN spur_events.tombstones ON tombstones.account = wanted.name
LEFT JOIN spur_events.allocations ON allocations.account = wanted.name
