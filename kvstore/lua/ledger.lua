#!lua flags=allow-oom,no-writes
-- Reads what became of all jobs that were ever accepted.
--
-- KEYS 1 ledger   2 workers
-- ARGV 1 what all names begin with
-- Returns seven numbers: accepted, finished, failed, cancelled, expired, dead; and the entries in all workers' streams.
--
-- Race closed: all of it is of one moment, so that it adds up while jobs come and go.
-- Streams are named by the workers; they share the hash tag, hence the slot.
local counted = redis.call('HMGET', KEYS[1], 'accepted', 'finished', 'failed', 'cancelled', 'expired', 'dead')
local result = {}
for i = 1, 6 do
  result[i] = tokens_of(counted[i])
end
local in_flight = 0
for _, worker in ipairs(redis.call('ZRANGE', KEYS[2], 0, -1)) do
  local length = redis.pcall('XLEN', ARGV[1] .. 'jobs:' .. worker)
  in_flight = in_flight + (type(length) == 'number' and length or 0)
end
result[7] = in_flight
return result
