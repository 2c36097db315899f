#!lua flags=allow-oom
-- Ends a job from outside: cancel, deadline.
--
-- KEYS 1 job   2 log
-- ARGV 1 group   2 what all names begin with   3 retention in ms   4 finish   5 octavo.v1.Deliveries to write
--      6 attempt that must be running, '' for any   7 expected gateway, '' for any   8 finisher (random, one per call of finish())
--      9 expected caller, or what its name begins with, '' for any   10 outcome, for the ledger
-- Returns 'ended', 'already', 'unknown' or 'fenced'.
--
-- Races closed: of several finishes and the worker's own last chunk exactly one is written; a finish repeated after a
-- lost reply is told 'ended' again; nobody cancels a job that somebody else has asked for meanwhile: a gateway
-- names the call that it ends the job for, and a caller who leaves is named by all its calls. No caller's leaving ends a
-- detached job. Nor does an attempt end a job that was moved to another worker meanwhile.
-- Stream and load are named by the job, see end_from_outside.
local seen = redis.pcall('HMGET', KEYS[1], 'worker', 'worker_incarnation', 'owner', 'gateway', 'entry', 'charge',
  'prefill', 'choices', 'state', 'attempt', 'finisher', 'caller', 'detached')
if seen.err or not seen[9] then
  return 'unknown'
end
if seen[9] == 'ended' then
  return seen[11] == ARGV[8] and 'ended' or 'already'
end
if (ARGV[6] ~= '' and (seen[10] ~= ARGV[6] or seen[9] ~= 'running')) or (ARGV[7] ~= '' and seen[4] ~= ARGV[7]) then
  return 'fenced'
end
if ARGV[9] ~= '' and (seen[13] == '1' or string.sub(seen[12] or '', 1, #ARGV[9]) ~= ARGV[9]) then
  return 'fenced'
end
redis.call('HSET', KEYS[1], 'finisher', ARGV[8])
end_from_outside(KEYS[1], KEYS[2], seen, ARGV[2], ARGV[1], ARGV[4], ARGV[10], ARGV[3], ARGV[5])
return 'ended'
