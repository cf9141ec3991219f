-- `spur-events revoke`: a new generation of memberships, without the memberships ending. The clusters then replace the
-- members' ServiceAccounts, and every token of the old ones is dead.

alter table spur_events.outbox drop constraint outbox_kind_check;
alter table spur_events.outbox add constraint outbox_kind_check check (kind in (
  'account_added', 'account_changed', 'account_deleted',
  'member_added', 'member_changed', 'member_removed', 'member_revoked', 'republished'
));

-- in_account: null for all accounts of the user. SECURITY DEFINER, so that an administrator needs no rights on the
-- tables; only those who were given EXECUTE may call it.
create function spur_events.revoke_member(of_user text, in_account text)
returns table (account text, generation text)
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
  return query
    with renewed as (
      update spur_events.memberships m set generation = gen_random_uuid()::text
      where m.user_name = of_user and (in_account is null or m.account = in_account)
      returning m.account, m.generation
    ), told as (
      insert into spur_events.outbox (account, kind, user_name)
        select r.account, 'member_revoked', of_user from renewed r order by r.account
    )
    select r.account, r.generation from renewed r order by r.account;
  if found then
    perform pg_notify('spur_events', '');
  end if;
end
$$;
revoke all on function spur_events.revoke_member(text, text) from public;
