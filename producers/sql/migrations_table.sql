-- Run before every migration, under the lock: where the record of applied migrations is kept.
create schema if not exists spur_events;
create table if not exists spur_events.migrations (
  number integer primary key,
  name text not null,
  applied_at timestamptz not null default now()
);
