#!lua flags=allow-oom
-- Takes or renews a worker's lease, and writes what the worker tells about itself.
--
-- KEYS 1 lease   2 workers   3 held blocks of this incarnation
-- ARGV 1 TTL in ms   2 that of the held blocks   3 worker   4 incarnation   5.. field, value of the rest of the lease
-- Returns {1, held blocks}, or {0, incarnation of the holder, its lease's time left in ms}.
--
-- Races closed: of two processes with one worker id one gets the lease; a process that was frozen for longer than its
-- lease cannot take it back from its successor. A lease that vanished (restarted or flushed server, frozen for a
-- moment) is made again. allow-oom: a full server must not look like a fleet of dead workers.
local holder = redis.call('HGET', KEYS[1], 'incarnation')
if holder and holder ~= ARGV[4] then
  return {0, holder, redis.call('PTTL', KEYS[1])}
end
redis.call('HSET', KEYS[1], 'incarnation', ARGV[4], unpack(ARGV, 5))
redis.call('PEXPIRE', KEYS[1], ARGV[1])
redis.call('ZADD', KEYS[2], int(now_ms()), ARGV[3])
redis.call('PEXPIRE', KEYS[3], ARGV[2])
return {1, held_count(KEYS[3])}
