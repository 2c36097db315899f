#!lua flags=allow-oom
-- Gives a worker's lease back.
--
-- KEYS 1 lease   2 workers   3 stream   4 load of this incarnation   5 its held blocks   6 its goodbye
-- ARGV 1 worker  2 incarnation   3 for how long the goodbye is kept, in ms   4 what it says: '', or 'broke', if that is why
-- Returns 1, or 0 when another incarnation holds the lease.
--
-- Races closed: a process that is late to leave cannot take its successor's lease away; jobs submitted meanwhile are not
-- lost with the stream: it stays, with a heartbeat of 0, and rehome.lua moves them; a successor that comes before that does
-- not make this life look like one that died. One that broke is one that died, perhaps of what it ran, unless it has said
-- before that it drains.
local holder = redis.call('HGET', KEYS[1], 'incarnation')
if holder and holder ~= ARGV[2] then
  return 0
end
redis.call('DEL', KEYS[1], KEYS[5])
if redis.pcall('XLEN', KEYS[3]) == 0 then -- pcall: one of another type must not keep the goodbye from being said
  redis.call('DEL', KEYS[3], KEYS[4], KEYS[6])
  redis.call('ZREM', KEYS[2], ARGV[1])
else
  redis.call('ZADD', KEYS[2], 0, ARGV[1])
  if ARGV[4] == '' then
    redis.call('SET', KEYS[6], '', 'PX', ARGV[3])
  else
    redis.call('SET', KEYS[6], ARGV[4], 'PX', ARGV[3], 'NX')
  end
end
return 1
