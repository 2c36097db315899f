#!lua
-- Accepts a job: hash, load and stream entry, or nothing. No allow-oom flag: a full server refuses it as a whole.
--
-- KEYS 1 job   2 log   3 stream   4 lease   5 load   6 routes
-- ARGV 1 payload       2 digest of the client's request     3 caller (random, one per call of a client)
--      4 worker        5 its incarnation                    6 gateway
--      7 time left in ms, '' for no deadline                8 bound of the stream
--      9 charge in tokens     10 prompt tokens     11 choices
--      12 of its prompt, tokens charged as not cached     13 tokens predicted as cached
--      14 octavo.v1.RouteRecord or ''     15 about how many of them are kept   16 for how long, in ms
--      17 '1': nobody's leaving ends it, '': the caller's does
-- Returns {'accepted'}, {'attached', worker, predicted, fingerprint}, {'taken'}, {'full', depth} or {'gone', why}.
--
-- Races closed: a retry after a lost reply finds its own caller and is told 'accepted' again; two gateways with one
-- request id get one job; the worker cannot be replaced, or be declared dead and its stream dropped, between the look
-- at its lease and the entry; many gateways together cannot exceed the stream's bound.
local job, log, stream, lease, load, routes = unpack(KEYS, 1, 6)

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

local now = now_ms()
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
charge_to(load, ARGV[9], ARGV[12], ARGV[11])
return {'accepted'}
