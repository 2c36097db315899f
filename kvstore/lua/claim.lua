#!lua flags=allow-oom
-- Makes an incarnation the owner of the jobs behind entries it has read.
--
-- KEYS 1 stream   2 lease   3 load of this incarnation   4.. job of each entry
-- ARGV 1 group    2 worker  3 incarnation   4 what the names of this worker's loads begin with
--      5 bytes that a job may have beside its prompt   6 and for each token of the context   7 where that is unknown
--      8 choices that a job may have   9.. entry ids
-- Returns {now, then for each entry 0 (removed, or not ours) or {payload, attempt, gateway, submitted, claimed,
-- deadline or '', choices, open choices, cached tokens, predicted ones, then of each choice: next index, end}}, times in ms; of
-- a job that is run for the first time nothing is told of its choices. {} when another incarnation holds the lease. A payload that has
-- more bytes than it may have is not read, its length stands in its place: a few jobs that somebody wrote by hand could
-- else hold up server and worker for seconds, and the lease with them.
--
-- Races closed: a job that was ended (cancel, deadline) between the read and the claim is not started; a claim that is
-- repeated after a lost reply returns the first one, attempt unchanged, so that the job is neither lost nor counted
-- twice; an incarnation that lost its worker id to another cannot claim any more, nor one whose entry was moved to
-- another worker; what is told of the choices is what the attempt goes on from, as no other attempt can write any more.
-- The load of an earlier incarnation is named by the job; it shares the hash tag, hence the slot.
local stream, lease, load = unpack(KEYS, 1, 3)
local group, worker, incarnation, loads = unpack(ARGV, 1, 4)

local holder, context, fingerprint = unpack(redis.call('HMGET', lease, 'incarnation', 'context_length', 'fingerprint'))
if holder and holder ~= incarnation then
  return {}
end

local most = tonumber(ARGV[7])
if context and tonumber(context) then
  most = math.min(most, tonumber(ARGV[5]) + tonumber(ARGV[6]) * tonumber(context))
end

local now = int(now_ms())
local claims = {now}
for i = 1, #KEYS - 3 do
  local job, entry = KEYS[3 + i], ARGV[8 + i]
  local seen = redis.pcall('HMGET', job, 'state', 'worker', 'entry', 'owner', 'attempt', 'worker_incarnation', 'charge',
    'claimed_ms', 'gateway', 'submitted_ms', 'deadline_ms', 'choices', 'open', 'prefill', 'cached_tokens', 'fingerprint',
    'predicted')
  -- Also false for a job submitted anew under the same id, which has an entry of its own.
  local live = not seen.err and (seen[1] == 'queued' or seen[1] == 'running') and seen[2] == worker and seen[3] == entry
  if not live then
    drop_entry(stream, group, entry)
    claims[i + 1] = 0
  else
    local attempt, claimed = seen[5], seen[8]
    local positions = attempt == '0' and {} or committed(job, seen[12], ARGV[8])
    if seen[1] == 'queued' or seen[4] ~= incarnation then
      attempt = redis.pcall('HINCRBY', job, 'attempt', 1)
      if type(attempt) == 'table' then
        attempt = 0 -- no number, so not written by us: the reader ends the job
      end
      claimed = now
      redis.call('HSET', job, 'state', 'running', 'owner', incarnation, 'claimed_ms', now, 'began',
        int(tokens_in(positions)), 'fingerprint', fingerprint or seen[16] or '')
      if seen[6] ~= incarnation then
        -- Submitted to an earlier life of this worker: the charge moves along.
        refund(loads .. (seen[6] or ''), seen[7], seen[14], seen[12])
        charge_to(load, seen[7], seen[14], seen[12])
        redis.call('HSET', job, 'worker_incarnation', incarnation)
      end
    end
    local payload = redis.call('HSTRLEN', job, 'payload')
    if payload <= most then
      payload = redis.call('HGET', job, 'payload')
    end
    claims[i + 1] = {payload, attempt, seen[9], seen[10], claimed, seen[11] or '', seen[12], seen[13], seen[15],
      seen[17] or '0', unpack(positions)}
  end
end
return claims
