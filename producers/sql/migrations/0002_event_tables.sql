-- What spur-events keeps for itself. Nobody but the triggers (0003) and the relay writes here, so no role
-- needs rights on this schema to edit accounts.

create table spur_events.installation (
  id text not null default gen_random_uuid()::text,
  epoch bigint not null default 1,
  batches bigint not null default 0,
  created_at timestamptz not null default now()
);
create unique index installation_is_one on spur_events.installation ((true));
insert into spur_events.installation default values;

create function spur_events.keep_installation() returns trigger
language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
  raise exception 'the row of spur_events.installation marks every object in the clusters and is never removed';
end
$$;
create trigger keep before delete or truncate on spur_events.installation
  for each statement execute function spur_events.keep_installation();

create sequence spur_events.revision;

-- Filled in the transaction that makes the change. Ids are taken at insert but visible at commit, so a
-- reader must never remember "the last id": the relay deletes what it has published.
create table spur_events.outbox (
  id bigint generated always as identity primary key,
  account text not null,
  kind text not null check (kind in (
    'account_added', 'account_changed', 'account_deleted',
    'member_added', 'member_changed', 'member_removed', 'republished'
  )),
  user_name text not null default '',
  before jsonb,
  after jsonb,
  database_user text not null default session_user,
  os_user text not null default coalesce(current_setting('spur_events.os_user', true), ''),
  application text not null default coalesce(current_setting('application_name', true), ''),
  at timestamptz not null default clock_timestamp()
);

-- Random ids, not counters: a database restored from a backup must never hand out a generation or an
-- incarnation a second time, since that would bring revoked ServiceAccounts back into use.
create table spur_events.memberships (
  user_name text not null,
  account text not null,
  generation text not null default gen_random_uuid()::text,
  primary key (user_name, account)
);
create index memberships_by_account on spur_events.memberships (account);

create table spur_events.incarnations (
  account text primary key,
  incarnation text not null default gen_random_uuid()::text
);

create table spur_events.tombstones (
  account text primary key,
  incarnation text not null,
  deleted_at timestamptz not null default clock_timestamp(),
  deleted_by text not null
);

-- The last well-formed grp_tres of each account, kept by the relay.
create table spur_events.allocations (
  account text primary key,
  limits text not null
);
