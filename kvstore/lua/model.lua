#!lua flags=allow-oom
-- Writes or extends a model's card.
--
-- KEYS 1 card
-- ARGV 1 TTL in ms   2 digest of the card   3.. field, value of the card (none: only extend)
-- Returns 1, or 0 when there is no card of that digest to extend.
--
-- Race closed: a card is never there in part, nor without a TTL, nor extended after another one took its place.
-- allow-oom: on a full server, gateways would otherwise forget the models that they serve.
local digest = redis.pcall('HGET', KEYS[1], 'digest')
if digest ~= ARGV[2] then
  if not ARGV[3] then
    return 0
  elseif type(digest) == 'table' then
    redis.call('DEL', KEYS[1]) -- of another type: not written by us
  end
  redis.call('HSET', KEYS[1], 'digest', ARGV[2], unpack(ARGV, 3))
end
redis.call('PEXPIRE', KEYS[1], ARGV[1])
return 1
