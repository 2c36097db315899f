#!lua flags=allow-oom
-- Moves a job that nobody will run to a worker that will, or gives it up.
--
-- KEYS 1 workers   2 lease of the worker that has it   3 its stream   4 job   5 log   6 the dead
--      7 since when jobs of that worker's lives have nobody
--      with a target: 8 its lease   9 its stream   10 load of its incarnation   11 mark of its suspect
-- ARGV 1 group   2 what all names begin with   3 worker   4 lease TTL in ms   5 entry   6 attempt
--      7 deaths and   8 fruitless attempts, with this one   9 choices that a job may have
--      10 mover (random, one per call of rehome())   11 retention in ms
--      12 for how long it waits for a target, in ms   13 finish of a job that is given up
--      14 octavo.v1.Deliveries for one that waited in vain   15 for one that too many workers died of
--      16 octavo.v1.DeadJob, '': it has no such fault   17 about how many of them are kept   18 for how long, in ms
--      with a target: 19 worker   20 its incarnation   21 of the prompt and the tokens, what it computes anew
--      22 tokens predicted as cached   23 for how long the mark is kept, in ms   24 deaths from which on a suspect is alone
-- Returns 'moved', 'ended' (it waited too long), 'dead', 'waiting' (there is no target yet, or the last suspect that was
-- moved there is one still and one of the two must be alone), or 'stale': it is not as the caller saw it, or the target is
-- gone. One that a draining worker has read is moved, or waits.
--
-- A job that a worker may have died of is a suspect until it is proven. After one death they go on at once, wherever
-- there is room: most were only there. After two a suspect goes only where the suspect that was moved there last is
-- proven by now, or gone, and no other one follows it before it is, whoever moves them: so no two of these are at
-- one worker, and what kills once more takes none with it that was beside it twice. (Only the last one's mark is kept:
-- suspects of one death that came before that may be there.) Who waits for its turn waits as long as it takes: there is a
-- worker for it, and should that go, its time begins then.
--
-- Races closed: the caller's look may be old, so all that it saw is compared here: of several gateways one moves a job;
-- a worker that came back, or read the entry after all, or tells of a token before it leaves, keeps it; a job that was
-- ended, moved or submitted anew under its id is left alone. A call that is repeated after a lost reply knows its own
-- work by the mover. The target's lease is looked at in one piece with the move, so that no job enters the stream of a
-- worker that is dead or about to leave. The old worker, should it only be frozen, is refused: it is the job's owner no
-- more, and its entry is gone. The charges are at one worker at any time.
-- The load where the job is charged is named by the job; it shares the hash tag, hence the slot.
local workers, lease, stream, job, log, dead, orphaned = unpack(KEYS, 1, 7)
local group, prefix, worker, ttl, entry, attempt, deaths, fruitless, most_choices, mover = unpack(ARGV, 1, 10)
local retention, patience, finish, unavailable, doomed, record, most_dead, dead_ttl = unpack(ARGV, 11, 18)

local seen = redis.pcall('HMGET', job, 'worker', 'worker_incarnation', 'owner', 'gateway', 'entry', 'charge', 'prefill',
  'choices', 'state', 'attempt', 'began', 'deaths', 'mover', 'finisher', 'fruitless', 'able_ms')
if seen.err then
  return 'stale'
elseif seen[9] == 'ended' then
  return seen[14] ~= mover and 'stale' or record ~= '' and 'dead' or 'ended'
elseif seen[13] == mover then
  return 'moved'
end
local life = life_of(workers, lease, worker, ttl)
if (seen[9] ~= 'queued' and seen[9] ~= 'running') or seen[1] ~= worker or seen[5] ~= entry or seen[10] ~= attempt then
  return 'stale'
end
local positions = committed(job, seen[8], most_choices)
local why, kept
if life then
  why, kept = why_abandoned(life, prefix, worker, seen[2], stream, group, entry, seen[9], seen[11], positions)
end
local died, ran = rows_of(prefix, worker, seen[9], seen[3], seen[11], seen[12], seen[15], positions)
if not why or int(died) ~= deaths or int(ran) ~= fruitless then
  return 'stale'
end
if kept and (record ~= '' or not KEYS[8]) then
  return 'waiting' -- who has it may bring it to its end
end

local function give_up(outcome, data)
  redis.call('HSET', job, 'finisher', mover, 'deaths', deaths)
  end_from_outside(job, log, seen, prefix, group, finish, outcome, retention, data)
end

-- Puts the job among the dead, and takes as many of the oldest away. pcall: only a record. A key of another type must not
-- keep it from ending.
local function bury()
  local times, request = prefix .. 'dead:times', string.match(job, ':job:(.*)$')
  redis.pcall('HSET', dead, request, record)
  redis.pcall('ZADD', times, int(now_ms()), request)
  local surplus = redis.pcall('ZCARD', times)
  surplus = type(surplus) == 'number' and surplus - tonumber(most_dead) or 0
  if surplus > 0 then
    redis.pcall('HDEL', dead, unpack(redis.call('ZRANGE', times, 0, surplus - 1)))
    redis.call('ZREMRANGEBYRANK', times, 0, surplus - 1)
  end
  redis.call('PEXPIRE', dead, dead_ttl)
  redis.call('PEXPIRE', times, dead_ttl)
end

if record ~= '' then
  bury()
  give_up('dead', doomed)
  return 'dead'
end

local past = seen[2] or ''
if not KEYS[8] then
  local since = redis.pcall('HGET', orphaned, past .. ' ' .. why)
  since = type(since) == 'string' and tokens_of(since) or 0
  if since == 0 or now_ms() - math.max(since, tokens_of(seen[16])) <= tonumber(patience) then
    return 'waiting'
  end
  give_up('failed', unavailable)
  return 'ended'
end

local target_lease, target_stream, target_load, mark = unpack(KEYS, 8, 11)
local target, incarnation, prefill, predicted, mark_ttl, alone = unpack(ARGV, 19, 24)
local request = string.match(job, ':job:(.*)$')
local holder = redis.pcall('HMGET', target_lease, 'incarnation', 'state')
if holder.err or holder[1] ~= incarnation or holder[2] ~= 'ready' then
  return 'stale'
end

-- Whether one of the two must be alone, this job or the last suspect that was moved to the target: the job that the mark
-- names, if that is still there, not read or running, and not proven since. Nobody takes a mark away, so it says nothing
-- without its job.
local function occupied()
  local named = redis.pcall('GET', mark)
  if type(named) ~= 'string' or named == request then
    return false
  end
  local other = prefix .. 'job:' .. named
  local known = redis.pcall('HMGET', other, 'state', 'worker', 'owner', 'entry', 'deaths', 'began', 'choices')
  if known.err or known[2] ~= target or tokens_of(known[5]) == 0 then
    return false
  elseif tonumber(deaths) < tonumber(alone) and tokens_of(known[5]) < tonumber(alone) then
    return false
  end
  local found = redis.pcall('XRANGE', target_stream, known[4] or '', known[4] or '')
  if found.err or not found[1] then
    return false
  end
  return known[1] == 'queued' or (known[1] == 'running' and known[3] == incarnation
    and not is_proven(known[6], committed(other, known[7], most_choices)))
end

local suspect = tonumber(deaths) > 0
if suspect and occupied() then
  redis.call('HSET', job, 'able_ms', int(now_ms())) -- there is a worker
  return 'waiting'
end
-- No pcall: nothing is written before, and a key of another type is for the caller, who then takes another target.
local moved = redis.call('XADD', target_stream, '*', 'request', request)
drop_entry(stream, group, entry)
refund(prefix .. 'load:' .. worker .. ':' .. past, seen[6], seen[7], seen[8])
charge_to(target_load, seen[6], prefill, seen[8])
redis.call('HSET', job, 'worker', target, 'worker_incarnation', incarnation, 'entry', moved, 'state', 'queued', 'owner', '',
  'prefill', prefill, 'predicted', predicted, 'deaths', deaths, 'fruitless', fruitless, 'mover', mover)
if suspect then
  redis.call('SET', mark, request, 'PX', mark_ttl)
end
if seen[3] and seen[3] ~= '' then
  redis.call('PUBLISH', prefix .. 'channel:' .. seen[3], request)
end
return 'moved'
