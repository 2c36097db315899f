#!lua flags=allow-oom
-- Ends jobs that nobody will run: all of a dead worker's, and those that a replaced incarnation had read.
--
-- KEYS 1 workers   2 lease   3 stream   then for each entry: job, log
-- ARGV 1 group   2 what all names begin with   3 retention in ms   4 worker   5 lease TTL in ms   6 finish
--      then for each entry: its id, octavo.v1.Deliveries to write
-- Returns {'alive' or 'dead', then the numbers (from 1) of the entries whose jobs were ended}.
--
-- Races closed: the caller's look at the fleet may be old, so death is decided here, in one piece with its
-- consequences; several gateways may do this at once, each job is ended by one of them; a worker that comes back is
-- seen by its lease; no job can enter the stream between its last entry's end and its deletion, as submit.lua looks at
-- the same lease; a worker that comes back between two calls finds its load charged with just the jobs that are left.
-- A lease may also vanish with its worker alive, when the server was restarted: so the last heartbeat must be older than
-- the TTL, and the server itself up for longer, which gives everybody time to come back. (A score of 0 is a worker that
-- said goodbye.)
-- Keys of loads and held blocks are named by jobs and consumers; they share the hash tag, hence the slot. (The blocks of
-- an incarnation that never was a consumer expire.)
local workers, lease, stream = unpack(KEYS, 1, 3)
local group, prefix, retention, worker, ttl, finish = unpack(ARGV, 1, 6)

local holder = redis.call('HGET', lease, 'incarnation')
if not holder then
  local beat = tonumber(redis.call('ZSCORE', workers, worker) or '')
  if not beat or now_ms() - beat <= tonumber(ttl) then
    return {'alive'}
  end
  local uptime = tonumber(string.match(redis.call('INFO', 'server'), 'uptime_in_seconds:(%d+)'))
  if beat > 0 and uptime * 1000 <= tonumber(ttl) + 1000 then
    return {'alive'}
  end
end

-- Nobody to wait for: never read for a dead worker, read by another incarnation for a live one.
local function abandoned(entry)
  if not holder then
    return true
  end
  local pending = redis.pcall('XPENDING', stream, group, entry, entry, 1)
  return not pending.err and pending[1] and pending[1][2] ~= holder
end

local result = {holder and 'alive' or 'dead'}
for i = 1, (#KEYS - 3) / 2 do
  local job, log, entry, data = KEYS[2 * i + 2], KEYS[2 * i + 3], ARGV[2 * i + 5], ARGV[2 * i + 6]
  if abandoned(entry) then
    local seen = redis.pcall('HMGET', job, 'worker', 'worker_incarnation', 'owner', 'gateway', 'entry', 'charge', 'prefill',
      'choices', 'state')
    if seen.err or (seen[9] ~= 'queued' and seen[9] ~= 'running') or seen[1] ~= worker or seen[5] ~= entry then
      drop_entry(stream, group, entry)
    else
      end_from_outside(job, log, seen, prefix, group, finish, 'failed', retention, data)
      result[#result + 1] = i
    end
  end
end

local consumers = redis.pcall('XINFO', 'CONSUMERS', stream, group)
for _, consumer in ipairs(consumers.err and {} or consumers) do
  -- {'name', name, 'pending', count, ...}
  if holder and consumer[2] ~= holder and consumer[4] == 0 then
    redis.call('XGROUP', 'DELCONSUMER', stream, group, consumer[2])
    redis.call('DEL', prefix .. 'held:' .. worker .. ':' .. consumer[2])
  end
end
if not holder and redis.call('XLEN', stream) == 0 then
  for _, consumer in ipairs(consumers.err and {} or consumers) do
    local life = worker .. ':' .. consumer[2]
    redis.call('DEL', prefix .. 'load:' .. life, prefix .. 'held:' .. life)
  end
  redis.call('DEL', stream)
  redis.call('ZREM', workers, worker)
end
return result
