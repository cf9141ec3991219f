-- The account must be unknown to the database at this very moment: a tombstone never meets a live account.
WITH recorded AS (
  INSERT INTO spur_events.tombstones (account, incarnation, deleted_by)
  SELECT %(account)s, %(incarnation)s, %(by)s
  WHERE NOT EXISTS (SELECT FROM accounts WHERE name = %(account)s)
  ON CONFLICT (account) DO UPDATE
     SET incarnation = excluded.incarnation, deleted_at = clock_timestamp(), deleted_by = excluded.deleted_by
  RETURNING account
)
INSERT INTO spur_events.outbox (account, kind, database_user, application)
SELECT account, 'account_deleted', session_user, 'spur-events relay' FROM recorded
