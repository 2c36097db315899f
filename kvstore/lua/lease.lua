#!lua flags=allow-oom
-- Takes or renews a worker's lease, and writes what the worker tells about itself.
--
-- KEYS 1 lease   2 workers
-- ARGV 1 TTL in ms   2 worker   3 incarnation   4.. field, value of the rest of the lease
-- Returns {1}, or {0, incarnation of the holder, its lease's time left in ms}.
--
-- Races closed: of two processes with one worker id one gets the lease; a process that was frozen for longer than its
-- lease cannot take it back from its successor. A lease that vanished (restarted or flushed server, frozen for a
-- moment) is made again. allow-oom: a full server must not look like a fleet of dead workers.
local holder = redis.call('HGET', KEYS[1], 'incarnation')
if holder and holder ~= ARGV[3] then
  return {0, holder, redis.call('PTTL', KEYS[1])}
end
redis.call('HSET', KEYS[1], 'incarnation', ARGV[3], unpack(ARGV, 4))
redis.call('PEXPIRE', KEYS[1], ARGV[1])
redis.call('ZADD', KEYS[2], int(now_ms()), ARGV[2])
return {1}
