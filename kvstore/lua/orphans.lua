#!lua flags=allow-oom
-- Finds the jobs in one worker's stream that nobody will run, or that a draining worker need not run, and clears up behind
-- the dead.
--
-- KEYS 1 workers   2 lease   3 stream   4 since when jobs of its lives have nobody
-- ARGV 1 group   2 what all names begin with   3 worker   4 lease TTL in ms
--      5 entry to go on behind, '' for the beginning   6 entries to look at   7 choices that a job may have
-- Returns {now in ms, entry to go on behind, '' when all was looked at, then for each job {entry, request, 'died', 'left',
-- 'broke', 'was restarted' or 'is draining', length of its payload, attempt, state, incarnation, fingerprint, model, prompt tokens,
-- charge, deaths, fruitless attempts, for how long it has had nobody in ms, choices, then of each choice: next index, end}};
-- {} where nothing can be told.
--
-- It finds: all jobs of a dead worker; those that an earlier life of a live worker had read; those that a draining worker
-- has not read, or told no token of. Entries that name no job of theirs are dropped. What becomes of the others is decided
-- by rehome.lua, in the moment of the move. Payloads are not told: jobs that have to wait are looked at again and again.
--
-- What became of a life leaves its jobs with nobody from when they are first found so, all of them together; of a job for
-- which there was a worker since, from then on (rehome.lua). That ends when the life is found alive; and it is forgotten
-- where nobody has looked for as long as a lease lasts, which is sooner than a life that came back can be taken for dead
-- again.
--
-- Races closed: death is decided here, not by the caller's look at the fleet, which may be old; no job can enter a dead
-- worker's stream between its last entry's end and its deletion, as submit.lua looks at the same lease.
-- Keys of jobs, loads and held blocks are named by entries, jobs and consumers; they share the hash tag, hence the slot.
-- (The blocks of an incarnation that never was a consumer expire.)
local workers, lease, stream, orphaned = unpack(KEYS, 1, 4)
local group, prefix, worker, ttl, behind, most_entries, most_choices = unpack(ARGV, 1, 7)
most_entries = tonumber(most_entries)

local life = life_of(workers, lease, worker, ttl)
if not life then
  return {}
end
local consumers = redis.pcall('XINFO', 'CONSUMERS', stream, group) -- each {'name', name, 'pending', count, ...}
consumers = consumers.err and {} or consumers
local from = behind == '' and '-' or '(' .. behind

-- What others than its live incarnation have read. Of entries that somebody trimmed nothing names the job: they only have
-- to leave the group.
local function read_by_others()
  local found = {}
  local pending = redis.pcall('XPENDING', stream, group, from, '+', most_entries)
  pending = pending.err and {} or pending
  for _, each in ipairs(pending) do
    if each[2] ~= life.incarnation then
      local entry = redis.call('XRANGE', stream, each[1], each[1])[1]
      found[#found + 1] = {each[1], entry and entry[2][2] or '', 'was restarted'}
    end
  end
  return found, pending
end

-- All entries.
local function written()
  local found = {}
  for _, each in ipairs(redis.call('XRANGE', stream, from, '+', 'COUNT', most_entries)) do
    found[#found + 1] = {each[1], each[2][2] or ''}
  end
  return found, found
end

if life.incarnation then
  local fates = life.incarnation .. ' '
  redis.pcall('HDEL', orphaned, fates .. 'died', fates .. 'left', fates .. 'broke')
end
local entries, looked_at
if life.incarnation and not life.draining then
  entries, looked_at = read_by_others()
else
  entries, looked_at = written()
end

local now, since = now_ms(), {}

-- For how long what became of an incarnation has left a job with nobody. A key of another type, or what is no time, was
-- not written by us.
local function waited(fate, able)
  if not since[fate] then
    if type(redis.pcall('HSETNX', orphaned, fate, int(now))) == 'table' then
      redis.call('DEL', orphaned)
      redis.call('HSETNX', orphaned, fate, int(now))
    end
    redis.call('PEXPIRE', orphaned, ttl)
    local began = tokens_of(redis.call('HGET', orphaned, fate))
    since[fate] = began > 0 and began or now
  end
  return math.max(now - math.max(since[fate], tokens_of(able)), 0)
end

-- What is told of a job; nil for an entry that names none of this worker's, {} for one that is in good hands.
local function head(entry, request, why)
  local job = prefix .. 'job:' .. request
  local seen = redis.pcall('HMGET', job, 'state', 'worker', 'entry', 'owner', 'attempt', 'began', 'deaths', 'fruitless',
    'choices', 'fingerprint', 'worker_incarnation', 'model', 'prompt_tokens', 'charge', 'able_ms')
  if seen.err or (seen[1] ~= 'queued' and seen[1] ~= 'running') or seen[2] ~= worker or seen[3] ~= entry then
    return nil
  end
  local positions = committed(job, seen[9], most_choices)
  local deaths, fruitless = rows_of(prefix, worker, seen[1], seen[4], seen[6], seen[7], seen[8], positions)
  why = why or why_abandoned(life, prefix, worker, seen[11], stream, group, entry, seen[1], seen[6], positions)
  if not why then
    return {}
  end
  local incarnation = seen[11] or ''
  return {entry, request, why, redis.call('HSTRLEN', job, 'payload'), seen[5], seen[1], incarnation, seen[10] or '',
    seen[12] or '', seen[13], seen[14], deaths, fruitless, waited(incarnation .. ' ' .. why, seen[15]), seen[9],
    unpack(positions)}
end

local result = {int(now), #looked_at == most_entries and looked_at[#looked_at][1] or ''}
for _, entry in ipairs(entries) do
  local told = head(unpack(entry))
  if not told then
    drop_entry(stream, group, entry[1])
  elseif #told > 0 then
    result[#result + 1] = told
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
  redis.call('DEL', stream, orphaned)
  redis.call('ZREM', workers, worker)
end
return result
