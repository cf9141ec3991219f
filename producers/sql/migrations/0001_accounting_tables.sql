-- The accounting tables as spur (August 2026) creates them, each only where it is absent: a site that
-- has them keeps them untouched. Unqualified on purpose: the site's search_path says where they live.

do $$
begin
  if to_regclass('accounts') is null then
    create table accounts (
      name text primary key,
      description text not null default '',
      organization text not null default '',
      parent_account text,
      fairshare_weight integer not null default 1,
      max_running_jobs integer,
      grp_tres text,
      created_at timestamptz not null default now()
    );
  end if;

  if to_regclass('users') is null then
    create table users (
      name text not null,
      account text not null references accounts (name),
      admin_level text not null default 'none',
      default_account text,
      created_at timestamptz not null default now(),
      primary key (name, account)
    );
    create unique index users_one_default on users (name) where default_account is not null;
  end if;

  if to_regclass('associations') is null then
    create table associations (
      id serial primary key,
      user_name text not null,
      account text references accounts (name),
      partition_name text,
      fairshare_weight integer not null default 1,
      max_running_jobs integer,
      max_submit_jobs integer,
      grp_submit_jobs integer,
      max_wall_min integer,
      max_tres_per_job text,
      grp_tres text,
      default_qos text,
      allowed_qos text,
      created_at timestamptz not null default now(),
      unique (user_name, account, partition_name)
    );
  end if;

  if to_regclass('qos') is null then
    create table qos (
      name text primary key,
      description text not null default '',
      priority integer not null default 0,
      preempt_mode text not null default 'off',
      preempt text not null default '',
      usage_factor real not null default 1.0,
      max_jobs_per_user integer,
      max_submit_per_user integer,
      max_submit_per_account integer,
      grp_submit_jobs integer,
      max_wall_min integer,
      grp_wall_min integer,
      preempt_exempt_time integer,
      max_tres_per_job text,
      max_tres_per_user text,
      grp_tres text,
      flags text not null default '',
      created_at timestamptz not null default now()
    );
  end if;

  if to_regclass('txn') is null then
    create table txn (
      id bigserial primary key,
      ts timestamptz not null default now(),
      actor text not null,
      actor_uid bigint,
      verified boolean not null default false,
      source text not null default '',
      action text not null,
      entity_type text not null,
      entity_name text not null,
      outcome text not null,
      details text not null default '{}'
    );
  end if;
end
$$;
