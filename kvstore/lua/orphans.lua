#!lua flags=allow-oom
-- Finds the jobs in one worker's stream that nobody will run, or that a draining worker need not run, and clears up behind
-- the dead.
--
-- KEYS 1 workers   2 lease   3 stream
-- ARGV 1 group   2 what all names begin with   3 worker   4 lease TTL in ms
--      5 entries to look at   6 bytes of payloads, about   7 bytes that one payload may have   8 choices that a job may have
-- Returns {now in ms, 'died', 'left', 'was restarted' or 'is draining', then for each job {entry, request, payload or its
-- length, attempt, state, incarnation, fingerprint, deaths, choices, then of each choice: next index, end}}; {} where nothing
-- can be told.
--
-- It finds: all jobs of a dead worker; those that an earlier life of a live worker had read; those that a draining worker
-- has not read, and the latest that it has read but said nothing of. Entries that name no job of theirs are dropped. What
-- becomes of the others is decided by rehome.lua, in the moment of the move.
--
-- Races closed: death is decided here, not by the caller's look at the fleet, which may be old; no job can enter a dead
-- worker's stream between its last entry's end and its deletion, as submit.lua looks at the same lease.
-- Keys of jobs, loads and held blocks are named by entries, jobs and consumers; they share the hash tag, hence the slot.
-- (The blocks of an incarnation that never was a consumer expire.)
local workers, lease, stream = unpack(KEYS, 1, 3)
local group, prefix, worker, ttl = unpack(ARGV, 1, 4)
local most_entries, most_bytes, most_payload, most_choices =
  tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7]), ARGV[8]

local life = life_of(workers, lease, worker, ttl)
if not life then
  return {}
end
local consumers = redis.pcall('XINFO', 'CONSUMERS', stream, group) -- each {'name', name, 'pending', count, ...}
consumers = consumers.err and {} or consumers

local entries = {}

-- Up to a number of entries of the stream, from one place on.
local function add_range(from)
  for _, entry in ipairs(redis.call('XRANGE', stream, from, '+', 'COUNT', most_entries - #entries)) do
    entries[#entries + 1] = {entry[1], entry[2][2] or ''}
  end
end

-- What a consumer has read. Of entries that somebody trimmed nothing names the job: they only have to leave the group.
local function add_pending(consumer)
  for _, pending in ipairs(redis.call('XPENDING', stream, group, '-', '+', most_entries - #entries, consumer)) do
    local found = redis.call('XRANGE', stream, pending[1], pending[1])
    entries[#entries + 1] = {pending[1], found[1] and found[1][2][2] or ''}
  end
end

-- What was read last, which most likely has no token yet. In order, before what is there already: it came before that.
local function add_read(last)
  for _, entry in ipairs(redis.call('XREVRANGE', stream, last, '-', 'COUNT', most_entries - #entries)) do
    table.insert(entries, 1, {entry[1], entry[2][2] or '', true})
  end
end

-- nil: there is no group yet.
local function last_delivered()
  local groups = redis.pcall('XINFO', 'GROUPS', stream)
  for _, told in ipairs(groups.err and {} or groups) do
    local fields = {}
    for i = 1, #told, 2 do
      fields[told[i]] = told[i + 1]
    end
    if fields.name == group then
      return fields['last-delivered-id']
    end
  end
end

local why = life.left and 'left' or 'died'
if life.incarnation then
  why = 'was restarted'
  for _, consumer in ipairs(consumers) do
    if consumer[2] ~= life.incarnation and consumer[4] > 0 and #entries < most_entries then
      add_pending(consumer[2])
    end
  end
  if life.draining and #entries == 0 then
    why = 'is draining'
    local last = last_delivered()
    add_range(last and '(' .. last or '-')
    if last and #entries < most_entries then
      add_read(last)
    end
  end
else
  add_range('-')
end

-- What is told of a job; nil for an entry that names none of this worker's, {} for one that its worker, which has `read`
-- it, keeps.
local function head(entry, request, read)
  local job = prefix .. 'job:' .. request
  local seen = redis.pcall('HMGET', job, 'state', 'worker', 'entry', 'owner', 'attempt', 'began', 'deaths', 'choices',
    'fingerprint', 'worker_incarnation')
  if seen.err or (seen[1] ~= 'queued' and seen[1] ~= 'running') or seen[2] ~= worker or seen[3] ~= entry then
    return nil
  end
  local positions = committed(job, seen[8], most_choices)
  if read and not untold(seen[1], seen[6], positions) then
    return {}
  end
  local payload = redis.call('HSTRLEN', job, 'payload')
  if payload <= most_payload then
    payload = redis.call('HGET', job, 'payload')
  end
  local deaths = deaths_of(prefix, worker, seen[1], seen[4], seen[6], seen[7], positions)
  return {entry, request, payload, seen[5], seen[1], seen[10] or '', seen[9] or '', deaths, seen[8],
    unpack(positions)}
end

local result, bytes = {int(now_ms()), why}, 0
for _, entry in ipairs(entries) do
  local told = head(unpack(entry))
  if not told then
    drop_entry(stream, group, entry[1])
  elseif #told > 0 and bytes < most_bytes then
    result[#result + 1] = told
    bytes = bytes + (type(told[3]) == 'string' and #told[3] or 0)
  end
end

for _, consumer in ipairs(consumers) do
  if life.incarnation and consumer[2] ~= life.incarnation and consumer[4] == 0 then
    redis.call('XGROUP', 'DELCONSUMER', stream, group, consumer[2])
    redis.call('DEL', prefix .. 'held:' .. worker .. ':' .. consumer[2])
  end
end
if not life.incarnation and redis.call('XLEN', stream) == 0 then
  for _, consumer in ipairs(consumers) do
    local past = worker .. ':' .. consumer[2]
    redis.call('DEL', prefix .. 'load:' .. past, prefix .. 'held:' .. past)
  end
  redis.call('DEL', stream)
  redis.call('ZREM', workers, worker)
end
return result
