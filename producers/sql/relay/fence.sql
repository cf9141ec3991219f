-- Each batch changes this one row: a second relay that got past the advisory lock waits here, and
-- then fails to serialize instead of publishing from an older snapshot.
UPDATE spur_events.installation SET batches = batches + 1 RETURNING id, epoch
