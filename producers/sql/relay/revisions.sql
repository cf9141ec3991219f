-- A sequence does not roll back: a revision is never given out twice, whatever becomes of its batch.
SELECT nextval('spur_events.revision') AS number FROM generate_series(1, %(count)s)
