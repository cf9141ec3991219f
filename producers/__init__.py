"""From the accounting database to NATS: the outbox, the relay, and the commands that edit accounts."""
