-- Capture of every change of accounts and users, whoever makes it, in the transaction that makes it.
--
-- Statement-level triggers with transition tables: a bulk statement costs one run. SECURITY DEFINER, so that
-- a writer needs no rights on spur_events; therefore a fixed search_path, and the accounting table is only
-- named through TG_RELID. Actor columns come from the outbox's defaults: session_user is not the definer.
-- Where a statement replaces a row under the same key (MERGE runs insert triggers before delete triggers)
-- the key is still present when its deletion is handled: bookkeeping asks the table, the outbox tells all.
--
-- Transition tables have no statistics and parameterless plans are cached with the first statement's row
-- counts; enable_nestloop = off keeps a later bulk statement of the same session from a quadratic join.

create function spur_events.account_columns(account jsonb) returns jsonb
language sql immutable set search_path = pg_catalog, pg_temp as $$
  -- Only what changes the account's state; fairshare and job limits mean nothing to a cluster.
  select jsonb_build_object(
    'description', account -> 'description',
    'organization', account -> 'organization',
    'parent_account', account -> 'parent_account',
    'grp_tres', account -> 'grp_tres'
  )
$$;

create function spur_events.member_columns(member jsonb) returns jsonb
language sql immutable set search_path = pg_catalog, pg_temp as $$
  select jsonb_build_object('default_account', member -> 'default_account', 'admin_level', member -> 'admin_level')
$$;

create function spur_events.differing(this jsonb, other jsonb) returns jsonb
language sql immutable set search_path = pg_catalog, pg_temp as $$
  select jsonb_object_agg(c.key, c.value) from jsonb_each(this) as c where other -> c.key is distinct from c.value
$$;

create function spur_events.actor() returns text
language sql stable set search_path = pg_catalog, pg_temp as $$
  select case when coalesce(current_setting('spur_events.os_user', true), '') = '' then session_user::text
    else current_setting('spur_events.os_user', true) || ' (as database role ' || session_user || ')' end
$$;

create function spur_events.accounts_came(names text[], afters jsonb[]) returns void
language plpgsql set search_path = pg_catalog, pg_temp set enable_nestloop = off as $$
begin
  delete from spur_events.tombstones t where t.account = any (names);
  insert into spur_events.incarnations (account)
    select distinct c.name from unnest(names) as c (name) order by 1
    on conflict (account) do update set incarnation = excluded.incarnation;
  insert into spur_events.outbox (account, kind, after)
    select c.name, 'account_added', jsonb_strip_nulls(c.after)
    from unnest(names, afters) as c (name, after) order by c.name;
end
$$;

-- source: the table to ask for keys that are present again; null where nothing will be left (TRUNCATE).
create function spur_events.accounts_gone(source regclass, names text[], befores jsonb[]) returns void
language plpgsql set search_path = pg_catalog, pg_temp set enable_nestloop = off as $$
declare
  present text[] := '{}';
begin
  if source is not null then
    execute format('select coalesce(array_agg(a.name::text), ''{}'') from %s as a where a.name = any ($1)', source)
      into present using names;
  end if;
  delete from spur_events.allocations a where a.account = any (names);
  insert into spur_events.tombstones (account, incarnation, deleted_by)
    select g.name, coalesce(i.incarnation, ''), spur_events.actor()
    from (select distinct unnest(names) as name) as g
    left join spur_events.incarnations i on i.account = g.name
    where g.name <> all (present)
    on conflict (account) do update
      set incarnation = excluded.incarnation, deleted_at = excluded.deleted_at, deleted_by = excluded.deleted_by;
  delete from spur_events.incarnations i where i.account = any (names) and i.account <> all (present);
  insert into spur_events.outbox (account, kind, before)
    select g.name, 'account_deleted', jsonb_strip_nulls(g.before)
    from unnest(names, befores) as g (name, before) order by g.name;
end
$$;

create function spur_events.members_came(users text[], accounts text[], afters jsonb[]) returns void
language plpgsql set search_path = pg_catalog, pg_temp set enable_nestloop = off as $$
begin
  insert into spur_events.memberships (user_name, account)
    select distinct c.user_name, c.account from unnest(users, accounts) as c (user_name, account) order by 1, 2
    on conflict (user_name, account) do update set generation = excluded.generation;
  insert into spur_events.outbox (account, kind, user_name, after)
    select c.account, 'member_added', c.user_name, jsonb_strip_nulls(c.after)
    from unnest(users, accounts, afters) as c (user_name, account, after) order by c.account, c.user_name;
end
$$;

create function spur_events.members_gone(source regclass, users text[], accounts text[], befores jsonb[])
returns void
language plpgsql set search_path = pg_catalog, pg_temp set enable_nestloop = off as $$
declare
  present_users text[] := '{}';
  present_accounts text[] := '{}';
begin
  if source is not null then
    execute format(
      'select coalesce(array_agg(u.name::text), ''{}''), coalesce(array_agg(u.account::text), ''{}'')
       from %s as u join unnest($1, $2) as g (user_name, account) on u.name = g.user_name and u.account = g.account',
      source
    ) into present_users, present_accounts using users, accounts;
  end if;
  delete from spur_events.memberships m using unnest(users, accounts) as g (user_name, account)
    where m.user_name = g.user_name and m.account = g.account
      and (m.user_name, m.account) not in (select p.u, p.a from unnest(present_users, present_accounts) as p (u, a));
  insert into spur_events.outbox (account, kind, user_name, before)
    select g.account, 'member_removed', g.user_name, jsonb_strip_nulls(g.before)
    from unnest(users, accounts, befores) as g (user_name, account, before) order by g.account, g.user_name;
end
$$;

create function spur_events.on_accounts_insert() returns trigger
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
  names text[];
  afters jsonb[];
begin
  select array_agg(n.name), array_agg(spur_events.account_columns(to_jsonb(n))) into names, afters from new_rows n;
  if names is not null then
    perform spur_events.accounts_came(names, afters);
    perform pg_notify('spur_events', '');
  end if;
  return null;
end
$$;

create function spur_events.on_accounts_delete() returns trigger
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
  names text[];
  befores jsonb[];
begin
  select array_agg(o.name), array_agg(spur_events.account_columns(to_jsonb(o))) into names, befores from old_rows o;
  if names is not null then
    perform spur_events.accounts_gone(tg_relid, names, befores);
    perform pg_notify('spur_events', '');
  end if;
  return null;
end
$$;

-- A row whose key changes is a deletion and a creation; the name is the identity, so a key that is in both
-- transition tables is the same account.
create function spur_events.on_accounts_update() returns trigger
language plpgsql security definer set search_path = pg_catalog, pg_temp set enable_nestloop = off as $$
declare
  names text[];
  contents jsonb[];
  emitted bigint;
begin
  insert into spur_events.outbox (account, kind, before, after)
    select d.name, 'account_changed', spur_events.differing(d.before, d.after),
      spur_events.differing(d.after, d.before)
    from (
      select o.name, spur_events.account_columns(to_jsonb(o)) as before,
        spur_events.account_columns(to_jsonb(n)) as after
      from old_rows o join new_rows n on n.name = o.name
    ) as d
    where d.before <> d.after order by d.name;
  get diagnostics emitted = row_count;

  select array_agg(o.name), array_agg(spur_events.account_columns(to_jsonb(o))) into names, contents
    from old_rows o where not exists (select from new_rows n where n.name = o.name);
  if names is not null then
    perform spur_events.accounts_gone(tg_relid, names, contents);
    emitted := emitted + 1;
  end if;

  select array_agg(n.name), array_agg(spur_events.account_columns(to_jsonb(n))) into names, contents
    from new_rows n where not exists (select from old_rows o where o.name = n.name);
  if names is not null then
    perform spur_events.accounts_came(names, contents);
    emitted := emitted + 1;
  end if;

  if emitted > 0 then
    perform pg_notify('spur_events', '');
  end if;
  return null;
end
$$;

-- TRUNCATE also removes rows that a REPEATABLE READ snapshot cannot see; they would vanish untold.
create function spur_events.refuse_blind_truncate() returns void
language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
  if current_setting('transaction_isolation') not in ('read committed', 'read uncommitted') then
    raise exception 'spur_events cannot see all rows that a TRUNCATE removes in a % transaction',
      current_setting('transaction_isolation') using hint = 'Use READ COMMITTED, or DELETE.';
  end if;
end
$$;

create function spur_events.on_accounts_truncate() returns trigger
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
  names text[];
  befores jsonb[];
begin
  perform spur_events.refuse_blind_truncate();
  execute format(
    'select array_agg(a.name::text), array_agg(spur_events.account_columns(to_jsonb(a))) from %s as a',
    tg_relid::regclass
  ) into names, befores;
  if names is not null then
    perform spur_events.accounts_gone(null, names, befores);
    perform pg_notify('spur_events', '');
  end if;
  return null;
end
$$;

create function spur_events.on_users_insert() returns trigger
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
  users text[];
  accounts text[];
  afters jsonb[];
begin
  select array_agg(n.name), array_agg(n.account), array_agg(spur_events.member_columns(to_jsonb(n)))
    into users, accounts, afters from new_rows n;
  if users is not null then
    perform spur_events.members_came(users, accounts, afters);
    perform pg_notify('spur_events', '');
  end if;
  return null;
end
$$;

create function spur_events.on_users_delete() returns trigger
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
  users text[];
  accounts text[];
  befores jsonb[];
begin
  select array_agg(o.name), array_agg(o.account), array_agg(spur_events.member_columns(to_jsonb(o)))
    into users, accounts, befores from old_rows o;
  if users is not null then
    perform spur_events.members_gone(tg_relid, users, accounts, befores);
    perform pg_notify('spur_events', '');
  end if;
  return null;
end
$$;

create function spur_events.on_users_update() returns trigger
language plpgsql security definer set search_path = pg_catalog, pg_temp set enable_nestloop = off as $$
declare
  users text[];
  accounts text[];
  contents jsonb[];
  emitted bigint;
begin
  insert into spur_events.outbox (account, kind, user_name, before, after)
    select d.account, 'member_changed', d.name, spur_events.differing(d.before, d.after),
      spur_events.differing(d.after, d.before)
    from (
      select o.name, o.account, spur_events.member_columns(to_jsonb(o)) as before,
        spur_events.member_columns(to_jsonb(n)) as after
      from old_rows o join new_rows n on n.name = o.name and n.account = o.account
    ) as d
    where d.before <> d.after order by d.account, d.name;
  get diagnostics emitted = row_count;

  select array_agg(o.name), array_agg(o.account), array_agg(spur_events.member_columns(to_jsonb(o)))
    into users, accounts, contents
    from old_rows o where not exists (select from new_rows n where n.name = o.name and n.account = o.account);
  if users is not null then
    perform spur_events.members_gone(tg_relid, users, accounts, contents);
    emitted := emitted + 1;
  end if;

  select array_agg(n.name), array_agg(n.account), array_agg(spur_events.member_columns(to_jsonb(n)))
    into users, accounts, contents
    from new_rows n where not exists (select from old_rows o where o.name = n.name and o.account = n.account);
  if users is not null then
    perform spur_events.members_came(users, accounts, contents);
    emitted := emitted + 1;
  end if;

  if emitted > 0 then
    perform pg_notify('spur_events', '');
  end if;
  return null;
end
$$;

create function spur_events.on_users_truncate() returns trigger
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
  users text[];
  accounts text[];
  befores jsonb[];
begin
  perform spur_events.refuse_blind_truncate();
  execute format(
    'select array_agg(u.name::text), array_agg(u.account::text), array_agg(spur_events.member_columns(to_jsonb(u)))
     from %s as u',
    tg_relid::regclass
  ) into users, accounts, befores;
  if users is not null then
    perform spur_events.members_gone(null, users, accounts, befores);
    perform pg_notify('spur_events', '');
  end if;
  return null;
end
$$;

-- Firing a trigger needs no right on its function; calling one by hand would.
revoke all on all functions in schema spur_events from public;

-- Writers wait from here to the commit, so that no change falls between the rows read and the triggers. The
-- limit is for them: behind a long transaction they would queue after us for as long as it lasts.
set local lock_timeout = '30s';
lock table accounts, users in share row exclusive mode;

create trigger spur_events_insert after insert on accounts
  referencing new table as new_rows for each statement execute function spur_events.on_accounts_insert();
create trigger spur_events_update after update on accounts
  referencing old table as old_rows new table as new_rows
  for each statement execute function spur_events.on_accounts_update();
create trigger spur_events_delete after delete on accounts
  referencing old table as old_rows for each statement execute function spur_events.on_accounts_delete();
create trigger spur_events_truncate before truncate on accounts
  for each statement execute function spur_events.on_accounts_truncate();

create trigger spur_events_insert after insert on users
  referencing new table as new_rows for each statement execute function spur_events.on_users_insert();
create trigger spur_events_update after update on users
  referencing old table as old_rows new table as new_rows
  for each statement execute function spur_events.on_users_update();
create trigger spur_events_delete after delete on users
  referencing old table as old_rows for each statement execute function spur_events.on_users_delete();
create trigger spur_events_truncate before truncate on users
  for each statement execute function spur_events.on_users_truncate();

-- ALWAYS: session_replication_role = replica is no way around the capture.
alter table accounts enable always trigger spur_events_insert;
alter table accounts enable always trigger spur_events_update;
alter table accounts enable always trigger spur_events_delete;
alter table accounts enable always trigger spur_events_truncate;
alter table users enable always trigger spur_events_insert;
alter table users enable always trigger spur_events_update;
alter table users enable always trigger spur_events_delete;
alter table users enable always trigger spur_events_truncate;

-- What a site has already is published like a change.
insert into spur_events.incarnations (account) select name from accounts order by name;
insert into spur_events.memberships (user_name, account) select name, account from users order by name, account;
insert into spur_events.outbox (account, kind) select name, 'republished' from accounts order by name;
select pg_notify('spur_events', '') where exists (select from spur_events.outbox);
