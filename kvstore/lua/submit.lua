#!lua
-- Accepts a job: hash, load and stream entry, or nothing. No allow-oom flag: a full server refuses it as a whole.
--
-- KEYS 1 job   2 log   3 stream   4 lease   5 load   6 routes   7 what its tenant has asked for   8 its live jobs
-- ARGV 1 payload       2 digest of the client's request     3 caller (random, one per call of a client)
--      4 worker        5 its incarnation                    6 gateway
--      7 time left in ms, '' for no deadline                8 bound of the stream
--      9 charge in tokens     10 prompt tokens     11 choices
--      12 of its prompt, tokens charged as not cached     13 tokens predicted as cached
--      14 octavo.v1.RouteRecord or ''     15 about how many of them are kept   16 for how long, in ms
--      17 '1': nobody's leaving ends it, '': the caller's does
--      18 '1': it has a tenant, '': nobody's   of that tenant, '' for no limit: 19 requests and 20 tokens in a minute
--      21 live jobs
-- Returns {'accepted'}, {'attached', worker, predicted, fingerprint}, {'taken'}, {'full', depth}, {'gone', why}, or of a
-- tenant that asks for too much {'over', which limit ('requests', 'tokens', 'jobs'), what that would make,
-- in how many ms it is worth asking again: 0 not known, -1 never}.
--
-- Races closed: a retry after a lost reply finds its own caller and is told 'accepted' again; two gateways with one
-- request id get one job; the worker cannot be replaced, or be declared dead and its stream dropped, between the look
-- at its lease and the entry; many gateways together cannot exceed the stream's bound, nor a tenant's limits. What is
-- refused for another reason is charged nothing, and a retry not twice.
local job, log, stream, lease, load, routes, bucket, living = unpack(KEYS, 1, 8)
local now = now_ms()

-- How far a tenant's buckets are filled: they run out evenly, all of it within a minute. What is no number was not
-- written by us.
local function filled(field, limit)
  local seen = redis.pcall('HMGET', bucket, field, 'at_ms')
  if seen.err then
    redis.call('DEL', bucket)
    return 0
  end
  local level, at = tonumber(seen[1] or ''), tonumber(seen[2] or '')
  return level and at and math.max(0, level - math.max(0, now - at) * limit / 60000) or 0
end

-- How many of its jobs live. Those that somebody deleted do not count: they are looked for where it matters.
local function lives(limit)
  local number = redis.pcall('SCARD', living)
  if type(number) == 'table' then
    redis.call('DEL', living) -- a key of another type
    return 0
  elseif number >= limit then
    for _, request in ipairs(redis.call('SRANDMEMBER', living, 100)) do
      local state = redis.pcall('HGET', string.match(job, '^{[^}]*}:') .. 'job:' .. request, 'state')
      if state ~= 'queued' and state ~= 'running' then
        number = number - redis.call('SREM', living, request)
      end
    end
  end
  return number
end

-- What a job exceeds of its tenant's limits; nil, and what its buckets are then, if there is room in all of them.
local function meter()
  local charged = {'at_ms', int(now)}
  for _, each in ipairs({{'requests', 1, ARGV[19]}, {'tokens', tokens_of(ARGV[9]), ARGV[20]}}) do
    local field, amount, limit = each[1], each[2], tonumber(each[3])
    if limit then
      local level = filled(field, limit) + amount
      if level > limit then
        return {'over', field, int(math.ceil(level)), amount > limit and -1 or math.ceil((level - limit) * 60000 / limit)}
      end
      charged[#charged + 1] = field
      charged[#charged + 1] = string.format('%.3f', level)
    end
  end
  local most = tonumber(ARGV[21]) or math.huge
  if lives(most) >= most then
    return {'over', 'jobs', int(most + 1), 0}
  end
  return nil, charged
end

local known = attach(job, ARGV[2], ARGV[3], ARGV[6])
if known then
  return known
end

local holder = redis.call('HMGET', lease, 'incarnation', 'state', 'fingerprint', 'model')
if not holder[1] then
  return {'gone', 'its lease has lapsed'}
elseif holder[1] ~= ARGV[5] then
  return {'gone', 'it was replaced by ' .. holder[1]}
elseif holder[2] == 'draining' then
  return {'gone', 'it is draining'}
end

local depth = redis.call('XLEN', stream)
if depth >= tonumber(ARGV[8]) then
  return {'full', depth}
end

local over, charged
if ARGV[18] ~= '' then
  over, charged = meter()
end
if over then
  return over
end
-- What an earlier life of this id may have left, should the two ever have lost their common expiry.
redis.call('DEL', job, log)
local entry = redis.call('XADD', stream, '*', 'request', string.match(job, ':job:(.*)$'))
local fields = {'payload', ARGV[1], 'digest', ARGV[2], 'caller', ARGV[3], 'state', 'queued', 'worker', ARGV[4],
  'worker_incarnation', ARGV[5], 'owner', '', 'gateway', ARGV[6], 'attempt', '0', 'entry', entry,
  'submitted_ms', int(now), 'choices', ARGV[11], 'open', ARGV[11], 'charge', ARGV[9], 'prefill', ARGV[12],
  'prompt_tokens', ARGV[10], 'predicted', ARGV[13], 'cached_tokens', '0', 'fingerprint', holder[3] or '', 'model',
  holder[4] or '', 'detached', ARGV[17]}
local function also(field, value)
  fields[#fields + 1] = field
  fields[#fields + 1] = value
end
if ARGV[7] ~= '' then
  also('deadline_ms', int(now + tonumber(ARGV[7])))
end
if ARGV[20] ~= '' then
  also('metered', ARGV[9])
end
if ARGV[14] ~= '' then
  -- pcall: only a record. A key of another type must not leave a job half accepted.
  local route = redis.pcall('XADD', routes, 'MAXLEN', '~', ARGV[15], '*', 'd', ARGV[14])
  if type(route) == 'string' then
    also('route', route)
  end
  redis.call('PEXPIRE', routes, ARGV[16])
end
redis.call('HSET', job, unpack(fields))
count(job, 'accepted')
if charged then
  redis.call('SADD', living, string.match(job, ':job:(.*)$'))
end
if charged and #charged > 2 then
  redis.call('DEL', bucket) -- with what a limit that is gone has left: it would count as of now
  redis.call('HSET', bucket, unpack(charged))
  redis.call('PEXPIRE', bucket, 60000) -- by then they have run out
end
charge_to(load, ARGV[9], ARGV[12], ARGV[11])
return {'accepted'}
