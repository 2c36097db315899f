#!lua flags=allow-oom
-- Puts a job that has not ended back into its worker's stream, from which somebody took its entry by hand.
--
-- KEYS 1 job   2 workers   3 lease of the worker that has it   4 its stream
-- ARGV 1 worker   2 entry   3 lease TTL in ms
-- Returns 1 put back, 0 nothing to do.
--
-- Without an entry nobody claims a job, nor moves it when its worker is gone: both look through streams. What becomes of
-- it from here on is decided as ever, by claim.lua and rehome.lua. One that its worker runs is left to it.
--
-- Races closed: all scripts write a job and its entry in one piece, so that a job without its entry is nobody's
-- intermediate state; one that was moved meanwhile has another entry; of several calls, and of one that is repeated after a
-- lost reply, the first one makes the entry, and the others find it. A worker that had read the old entry and claims it
-- late is refused, as the job names the new one. A worker that was forgotten because its stream was empty is named again,
-- as one whose last heartbeat is now.
local job, workers, lease, stream = unpack(KEYS, 1, 4)
local worker, entry, ttl = unpack(ARGV, 1, 3)

local seen = redis.pcall('HMGET', job, 'state', 'owner', 'worker', 'entry')
if seen.err or (seen[1] ~= 'queued' and seen[1] ~= 'running') or seen[3] ~= worker or seen[4] ~= entry then
  return 0
end
if seen[1] == 'running' then
  local life = life_of(workers, lease, worker, ttl)
  if life and life.incarnation == seen[2] or not life and redis.call('ZSCORE', workers, worker) then
    return 0 -- it runs, or nobody can tell yet
  end
end
local found = redis.pcall('XRANGE', stream, entry, entry) -- pcall: an id that is none
if not found.err and found[1] then
  return 0
end
redis.call('HSET', job, 'entry', redis.call('XADD', stream, '*', 'request', string.match(job, ':job:(.*)$')))
redis.call('ZADD', workers, 'NX', int(now_ms()), worker)
return 1
