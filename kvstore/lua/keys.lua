#!lua flags=allow-oom
-- Changes API keys, or their tenants' limits.
--
-- KEYS 1 the keys
-- ARGV 1 field   2 what it says from now on, '': it goes   and so on, as many as there are
-- Returns the version of what holds now.
--
-- Races closed: of several changes at once none undoes another; fields and version change together, so that a gateway that
-- saw the version, and then the fields, has missed nothing while the version stays. allow-oom: a key can be revoked on a
-- full server.
for i = 1, #ARGV, 2 do
  if ARGV[i + 1] == '' then
    redis.call('HDEL', KEYS[1], ARGV[i])
  else
    redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1])
  end
end
return redis.call('HINCRBY', KEYS[1], 'version', 1)
