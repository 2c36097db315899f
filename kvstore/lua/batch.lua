#!lua flags=allow-oom
-- Makes a batch, moves it from one state to another, or notes how far it is.
--
-- KEYS 1 batch
-- KEYS 2 batches
-- KEYS 3 open batches
-- ARGV 1 id
-- ARGV 2 states that it may be in, with a blank before and after each; empty: it must be new
-- ARGV 3 state that it gets; empty: it keeps its own
-- ARGV 4 field that gets the time, unless it has one; empty: none
-- ARGV 5 TTL in ms of a batch that ends with this; empty: it does not end
-- ARGV 6... fields and their values
--
-- Answers with the state that it is in now; empty: there is no such batch.
--
-- Race closed: a batch is cancelled while it begins, goes on or ends.
local batch, id = KEYS[1], ARGV[1]
local state = redis.call('HGET', batch, 'state') or ''
local fits = state == '' and ARGV[2] == '' or state ~= '' and string.find(ARGV[2], ' ' .. state .. ' ', 1, true)
if not fits then
  return state
end
if #ARGV > 5 then
  redis.call('HSET', batch, unpack(ARGV, 6))
end
if ARGV[4] ~= '' then
  redis.call('HSETNX', batch, ARGV[4], int(now_ms()))
end
if ARGV[3] ~= '' then
  state = ARGV[3]
  redis.call('HSET', batch, 'state', state)
end
if state == 'queued' then
  redis.call('ZADD', KEYS[2], 'NX', int(now_ms()), id)
  redis.call('SADD', KEYS[3], id)
  redis.call('PERSIST', batch)
  redis.call('HDEL', batch, 'ended_ms')
end
if ARGV[5] ~= '' then
  redis.call('SREM', KEYS[3], id)
  redis.call('PEXPIRE', batch, ARGV[5])
end
return state
