"""Who may do what on NATS: accounts and roles (deploy/nats/accounts.json), keys, JWTs, the folder of a site.

Used by nats_command, consumers.auth, local.nats and the tests. Connections are the business of `jetstream`.
"""
