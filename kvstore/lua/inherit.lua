#!lua flags=allow-oom
-- Gives a job whose caller has left to one who waits for it still.
--
-- KEYS 1 job
-- ARGV 1 the caller who has left, or what the names of its calls begin with   2 heir   3 the heir's gateway
-- Returns 1, or 0 where somebody else has asked for the job last, or there is none.
--
-- Races closed: a call that comes meanwhile is the job's last caller, and stays that.
local caller = redis.pcall('HGET', KEYS[1], 'caller')
if type(caller) ~= 'string' or string.sub(caller, 1, #ARGV[1]) ~= ARGV[1] then
  return 0
end
redis.call('HSET', KEYS[1], 'caller', ARGV[2], 'gateway', ARGV[3])
return 1
