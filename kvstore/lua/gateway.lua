#!lua flags=allow-oom
-- Heartbeat of a gateway.
--
-- KEYS 1 lease
-- ARGV 1 TTL in ms
--
-- A script for the flag alone: plain SET is refused by a full server, and workers would take the gateway for dead.
return redis.call('SET', KEYS[1], '', 'PX', ARGV[1])
