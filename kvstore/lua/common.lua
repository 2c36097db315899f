-- Shared by all scripts; inserted after each one's first line, with lives.lua behind it.
--
-- Numbers: Lua has doubles only, and turns them into text with 14 digits. So ids, attempts and token indexes stay text
-- wherever they are only compared or stored, and milliseconds (13 digits today) are written with int().

local MOST_CHOICES = 32 -- of a job: kvstore.limits.MAX_CHOICES

local function int(number)
  return string.format('%.0f', number)
end

-- The server's clock in milliseconds. Constant within one script run.
local function now_ms()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end

-- A number of tokens or jobs as we write it; 0 for anything else, which somebody else wrote.
local function tokens_of(text)
  local number = tonumber(text or '')
  return number and number > 0 and number < 1e15 and math.floor(number) or 0
end

-- How many sequences a job is, from its field `choices`; one for what somebody else wrote.
local function sequences_of(choices)
  return math.max(tokens_of(choices), 1)
end

-- Whether a text is a count that we can have written, and add to.
local function is_count(text)
  return text == '0' or (#text <= 15 and string.match(text, '^[1-9]%d*$') ~= nil)
end

-- What a load says: jobs, sequences, tokens, prefill; nil: there is none. What is no load, or no count in one, was not
-- written by us: it must not stop anything, least of all half-way through. It counts as nothing, as it does for who reads
-- it, and goes with the next write.
local function load_of(load)
  local seen = redis.pcall('HMGET', load, 'jobs', 'sequences', 'tokens', 'prefill')
  if seen.err then
    redis.call('DEL', load)
    return nil
  end
  local exists, junk = false, false
  for field = 1, 4 do
    local number = seen[field]
    if number and is_count(number) then
      exists, seen[field] = true, tonumber(number)
    else
      junk, seen[field] = junk or number, 0
    end
  end
  if exists then
    return seen
  elseif junk then
    redis.call('DEL', load)
  end
  return nil
end

-- Writes a load as a whole, in one call: each costs as much as several fields.
local function write_load(load, jobs, sequences, tokens, prefill)
  redis.call('HSET', load, 'jobs', int(jobs), 'sequences', int(math.max(sequences, 0)), 'tokens', int(math.max(tokens, 0)),
    'prefill', int(math.max(prefill, 0)))
end

-- Puts one job on a worker's load. `prefill` is false where the job has nothing left to compute of its prompt.
local function charge_to(load, charge, prefill, choices)
  local jobs, sequences, tokens, computed = unpack(load_of(load) or {0, 0, 0, 0})
  write_load(load, jobs + 1, sequences + sequences_of(choices), tokens + tokens_of(charge), computed + tokens_of(prefill))
end

-- Takes off a worker's load what a prompt was charged. A load that is absent was dropped with its worker.
local function refund_prefill(load, prefill)
  local refunded = tokens_of(prefill)
  local known = refunded > 0 and load_of(load)
  if known then
    write_load(load, known[1], known[2], known[3], known[4] - refunded)
  end
end

-- Takes one job off a worker's load. A load that is absent was dropped with its worker; one that reaches no jobs is
-- deleted, so that a worker's past lives leave nothing behind.
local function refund(load, charge, prefill, choices)
  local known = load_of(load)
  if not known then
    return
  end
  local jobs, sequences, tokens, computed = unpack(known)
  if jobs <= 1 then
    redis.call('DEL', load)
  else
    write_load(load, jobs - 1, sequences - sequences_of(choices), tokens - tokens_of(charge), computed - tokens_of(prefill))
  end
end

local function drop_entry(stream, group, entry)
  -- pcall: an id that is none, in a job that somebody else wrote.
  redis.pcall('XACK', stream, group, entry)
  redis.pcall('XDEL', stream, entry)
end

-- Counts one more job in the ledger. pcall: a key of another type must not leave a job half accepted, or half ended.
local function count(job, outcome)
  redis.pcall('HINCRBY', string.match(job, '^{[^}]*}:') .. 'ledger', outcome, 1)
end

-- What is committed of each of a job's choices: its next index and its end, one after the other. Of as many choices as a
-- job may have, however many somebody wrote that it has.
local function committed(job, choices, most)
  local fields = {}
  for choice = 0, math.min(sequences_of(choices), tonumber(most)) - 1 do
    fields[#fields + 1] = 'next:' .. choice
    fields[#fields + 1] = 'end:' .. choice
  end
  return redis.call('HMGET', job, unpack(fields))
end

-- How many tokens of all choices that is.
local function tokens_in(positions)
  local sum = 0
  for i = 1, #positions, 2 do
    sum = sum + tokens_of(positions[i])
  end
  return sum
end

-- Takes a job that ends off its tenant's account: it lives no more, and what it was charged and has not used comes back.
-- What never began has used nothing. What was charged long ago has run out by itself, so what comes back of it is taken off
-- what was charged since, never below empty: over all minutes together nobody gets more than its limit, in one of them
-- perhaps what it left in those before.
local function settle(job)
  local prefix, request, tenant = string.match(job, '^({[^}]*}:)job:(([^/]+)/.*)$')
  if not tenant then
    return
  end
  redis.pcall('SREM', prefix .. 'live:' .. tenant, request)
  local metered, claimed, prompt, choices = unpack(redis.call('HMGET', job, 'metered', 'claimed_ms', 'prompt_tokens',
    'choices'))
  if not metered then
    return
  end
  local bucket = prefix .. 'quota:' .. tenant
  local filled = redis.pcall('HGET', bucket, 'tokens')
  filled = type(filled) == 'string' and tonumber(filled)
  if filled then
    local used = claimed and tokens_of(prompt) + tokens_in(committed(job, choices, MOST_CHOICES)) or 0
    local rest = filled - math.max(0, tokens_of(metered) - used)
    redis.call('HSET', bucket, 'tokens', string.format('%.3f', math.max(0, rest)))
  end
  redis.call('HDEL', job, 'metered')
end

-- The end of a job's life, the same for all who end it. The caller has checked that it has not ended yet. The payload
-- goes at once, as nobody will run it again; the rest stays readable for a while, as does the log. `outcome` is its
-- place in the ledger.
local function end_job(job, log, stream, group, load, entry, charge, prefill, choices, finish, outcome, retention)
  redis.call('HSET', job, 'state', 'ended', 'finish', finish)
  count(job, outcome)
  settle(job)
  redis.call('HDEL', job, 'payload', 'prefill')
  drop_entry(stream, group, entry)
  refund(load, charge, prefill, choices)
  redis.call('PEXPIRE', job, retention)
  redis.call('PEXPIRE', log, retention)
end

-- Ends a live job for anybody but its owner. `seen` is {worker, worker_incarnation, owner, gateway, entry, charge,
-- prefill, choices}.
-- The stream and the load are named by the job itself, so their keys cannot be declared in KEYS without reading the job
-- first, which would cost a round trip and open a race; they share the job's hash tag, hence its slot.
local function end_from_outside(job, log, seen, prefix, group, finish, outcome, retention, data)
  -- A field that is missing was not written by us; the job is ended all the same.
  for i = 1, 8 do
    seen[i] = seen[i] or ''
  end
  local worker, incarnation, owner, gateway, entry, charge, prefill, choices = unpack(seen, 1, 8)
  if redis.pcall('XADD', log, '*', 'd', data).err then
    redis.call('DEL', log)
    redis.call('XADD', log, '*', 'd', data)
  end
  end_job(job, log, prefix .. 'jobs:' .. worker, group, prefix .. 'load:' .. worker .. ':' .. incarnation, entry, charge,
    prefill, choices, finish, outcome, retention)
  if gateway ~= '' then
    redis.call('PUBLISH', prefix .. 'channel:' .. gateway, data)
  end
  if owner ~= '' then
    redis.call('PUBLISH', prefix .. 'channel:' .. owner, string.match(job, ':job:(.*)$'))
  end
end

-- Block hashes travel packed, 16 bytes each, in one argument: each argument costs the caller more than all that is done
-- with it here. In batches, as Lua's stack holds 8,000 values.
local function change_held(command, held, packed)
  local batch = {}
  for at = 1, #packed, 16 do
    batch[#batch + 1] = string.sub(packed, at, at + 15)
    if #batch == 1000 then
      redis.call(command, held, unpack(batch))
      batch = {}
    end
  end
  if #batch > 0 then
    redis.call(command, held, unpack(batch))
  end
end

-- How many blocks a worker is known to hold. A key of another type was not written by us; it must not stop anything.
local function held_count(held)
  local count = redis.pcall('SCARD', held)
  if type(count) == 'table' then
    redis.call('DEL', held)
    return 0
  end
  return count
end

-- Points a job that exists at the call that asks for it, whatever its payload is where `digest` is nil. nil: there is no
-- such job.
local function attach(job, digest, caller, gateway)
  local seen = redis.pcall('HMGET', job, 'digest', 'caller', 'worker', 'predicted', 'fingerprint')
  if seen.err then
    return {'taken'}
  end
  if not seen[1] then
    return nil
  end
  if digest and seen[1] ~= digest then
    return {'taken'}
  end
  redis.call('HSET', job, 'gateway', gateway, 'caller', caller)
  return {seen[2] == caller and 'accepted' or 'attached', seen[3] or '', seen[4] or '0', seen[5] or ''}
end
