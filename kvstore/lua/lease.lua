#!lua flags=allow-oom
-- Takes or renews a worker's lease, and writes what the worker tells about itself.
--
-- KEYS 1 lease   2 workers   3 held blocks of this incarnation   4 its load   5 stream   6 its goodbye
-- ARGV 1 TTL in ms   2 that of the held blocks   3 worker   4 incarnation   5 '1' when it has no job running or waiting
--      6 for how long a goodbye is kept, in ms; '': it says none, as it does not drain
--      7.. field, value of the rest of the lease
-- Returns {1, held blocks}, or {0, incarnation of the holder, its lease's time left in ms}.
--
-- Races closed: of two processes with one worker id one gets the lease; a process that was frozen for longer than its
-- lease cannot take it back from its successor. A lease that vanished (restarted or flushed server, frozen for a
-- moment) is made again; a job enters the stream in one piece with its charge and leaves it in one with the refund, so
-- that an idle worker whose stream is empty is charged with nothing: what its load still says, somebody else wrote.
-- A worker that drains has said goodbye, should it be killed before it has left.
-- allow-oom: a full server must not look like a fleet of dead workers.
local holder = redis.call('HGET', KEYS[1], 'incarnation')
if holder and holder ~= ARGV[4] then
  return {0, holder, redis.call('PTTL', KEYS[1])}
end
redis.call('HSET', KEYS[1], 'incarnation', ARGV[4], unpack(ARGV, 7))
redis.call('PEXPIRE', KEYS[1], ARGV[1])
redis.call('ZADD', KEYS[2], int(now_ms()), ARGV[3])
redis.call('PEXPIRE', KEYS[3], ARGV[2])
if ARGV[5] == '1' and redis.pcall('XLEN', KEYS[5]) == 0 then
  redis.call('DEL', KEYS[4])
end
if ARGV[6] ~= '' then
  redis.call('SET', KEYS[6], '', 'PX', ARGV[6])
end
return {1, held_count(KEYS[3])}
