#!lua flags=allow-oom
-- Changes API keys, or their tenants' limits.
--
-- KEYS 1 the keys
-- ARGV 1 version of what holds from now on: no other has had it   2 version that must hold until now, '': any
--      3 field   4 what it says from now on, '': it goes   and so on, as many as there are
-- Returns 1, or 0 where another version holds: then nothing is changed.
--
-- Races closed: of several changes at once none undoes another, nor what it was made from; fields and version change
-- together, so that a gateway that saw the version, and then the fields, has missed nothing while the version stays; a
-- change that is repeated after a lost reply is told 1 again. allow-oom: a key can be revoked on a full server.
local holds = redis.call('HGET', KEYS[1], 'version') or '0'
if holds == ARGV[1] then
  return 1
elseif ARGV[2] ~= '' and ARGV[2] ~= holds then
  return 0
end
for i = 3, #ARGV, 2 do
  if ARGV[i + 1] == '' then
    redis.call('HDEL', KEYS[1], ARGV[i])
  else
    redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1])
  end
end
redis.call('HSET', KEYS[1], 'version', ARGV[1])
return 1
