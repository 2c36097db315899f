#!lua flags=allow-oom
-- Tells what jobs wait at a worker that it has not read yet, for one that may take some of them.
--
-- KEYS 1 the worker's stream
-- ARGV 1 what all names begin with   2 worker   3 group   4 entries to look at
--      5 bytes that a payload may have   6 and all of them together   7.. entries that are not to be told again
-- Returns for each {entry, payload}. Left out: what has been read, ended or moved, what is too long to be hashed on the
-- side, and what would be too much for one answer.
--
-- Races closed: an entry and its payload are of one moment, so that no job submitted anew under its id is told in its
-- place. What is told may be taken by others the moment after: steal.lua judges again.
-- Jobs are named by entries; they share the hash tag, hence the slot.
local stream = KEYS[1]
local prefix, worker, group, count = unpack(ARGV, 1, 4)
local most, room = tonumber(ARGV[5]), tonumber(ARGV[6])
local known = {}
for i = 7, #ARGV do
  known[ARGV[i]] = true
end

-- How long the payload is of the job that waits behind an entry; 0: none waits there.
local function waiting(job, entry)
  local seen = redis.pcall('HMGET', job, 'state', 'worker', 'entry')
  if seen.err or seen[1] ~= 'queued' or seen[2] ~= worker or seen[3] ~= entry then
    return 0
  end
  return redis.call('HSTRLEN', job, 'payload')
end

local told = {}
local last = read_so_far(stream, group)
local entries = redis.pcall('XRANGE', stream, '(' .. last, '+', 'COUNT', count)
for _, entry in ipairs(entries.err and {} or entries) do
  local job = prefix .. 'job:' .. (entry[2][2] or '')
  local size = known[entry[1]] and 0 or waiting(job, entry[1])
  if size > 0 and size <= most and size <= room then
    room = room - size
    told[#told + 1] = {entry[1], redis.call('HGET', job, 'payload')}
  end
end
return told
