#!lua flags=allow-oom
-- Writes what one step of a worker produced: tokens, and which blocks its pool now offers and no longer offers.
--
-- KEYS 1 stream   2 load of this incarnation   3 its held blocks   then for each delivery: job, log
-- ARGV 1 group    2 incarnation   3 what channel names begin with   4 retention in ms
--      5 hashes of blocks added, packed   6 of blocks removed   7 TTL of the held blocks in ms   8 choices that a job may have
--      then for each delivery: 'attempt choice first-token-index index-after-the-last entry' (an entry that is left out is
--      not compared), and where the chunk is more than tokens ' finish outcome cached-tokens fetched-tokens' (finish 0: it
--      goes on, then there is no outcome; the last two are left out when not told); octavo.v1.Deliveries with this one delivery
-- Returns the number of held blocks, then for each delivery 0 written, 1 duplicate, 2 fenced, {next index} when the chunk does not follow on it,
-- or {field, value} where that is not as we write it: then nothing is written, and the caller ends the job.
--
-- Each choice has a next index and an end of its own; the job ends with the last of them, and its finish is that one's.
--
-- Races closed: a worker that was frozen while its job was ended or given to another attempt is refused (fenced), and so is
-- what was said of a job that the server has lost, when its id was submitted anew, which begins with the same attempt; a
-- commit that is repeated after a lost reply changes nothing (duplicate); of a last chunk and a finish from outside
-- exactly one is written. Of the held blocks a commit tells what changed, not how, so that a repeated one changes nothing;
-- one that is executed late, after the next, leaves wrong blocks, as does whatever else changes the set: the number gives
-- most of that away, and the worker compares the whole set now and then. allow-oom: a job that runs must be able to end on a full server.
local WRITTEN, DUPLICATE, FENCED = 0, 1, 2
local MOST_TOKENS = 4294967295 -- of an answer, as in records.py
local MOST_FINISH = 255 -- likewise
local call, pcall, match = redis.call, redis.pcall, string.match
local stream, load, held = KEYS[1], KEYS[2], KEYS[3]
local group, incarnation, channels, retention = unpack(ARGV, 1, 4)
local added, removed, held_ttl, most_choices = unpack(ARGV, 5, 8)
local by_gateway, gateways = {}, {}

local function publish_later(gateway, data)
  if not gateway or gateway == '' then
    return -- nobody listens, or somebody took the field away: whoever reads the log finds it there
  end
  local joined = by_gateway[gateway]
  if not joined then
    joined = {}
    by_gateway[gateway] = joined
    gateways[#gateways + 1] = gateway
  end
  joined[#joined + 1] = data
end

-- What the fields of a choice are called: next index and end.
local names = {}
local function names_of(choice)
  local known = names[choice]
  if not known then
    known = {'next:' .. choice, 'end:' .. choice}
    names[choice] = known
  end
  return known[1], known[2]
end

-- What is answered to a chunk that does not begin where its choice stands, `at`.
local function misplaced(at, start, stop, finish, ended)
  local next_index = tonumber(at)
  -- A chunk is written whole or not at all, and only once with a finish.
  if (ended or tonumber(start) < next_index) and tonumber(stop) <= next_index and (ended or finish == '0') then
    return DUPLICATE
  end
  return {at}
end

-- How many choices of a job have not ended, by their ends.
local function open_choices(job, choices)
  local positions, left = committed(job, choices, most_choices), 0
  for i = 2, #positions, 2 do
    left = left + (positions[i] and 0 or 1)
  end
  return left
end

-- A field that is not as we write it, and its value; nil: those are that this chunk needs. An index that it follows on is
-- one. Where `open` is not what the ends say, one of them is wrong, perhaps the number of choices: nobody can tell when
-- the job ends. If it is no number it says nothing. `left`: what the ends say; nil where the chunk has none.
local function damage(choice, choices, next_field, at, end_field, ended, follows, left, open)
  if choice ~= '0' and not is_count(choices or '') then
    return 'choices', choices or ''
  elseif not (follows or (is_count(at) and tonumber(at) <= MOST_TOKENS)) then
    return next_field, at
  elseif ended and not (is_count(ended) and ended ~= '0' and tonumber(ended) <= MOST_FINISH) then
    return end_field, ended
  elseif follows and left and is_count(open or '') and open ~= int(left) then
    return 'open', open
  end
end

-- What is committed of a chunk, in one call: each costs as much as several fields. `left`: choices that were open.
local function tell(job, next_field, stop, end_field, finish, left, cached, fetched)
  local fields = {next_field, stop}
  if finish ~= '0' then
    fields[3], fields[4], fields[5], fields[6] = end_field, finish, 'open', int(left - 1)
  end
  if cached ~= '' then
    fields[#fields + 1], fields[#fields + 2] = 'cached_tokens', cached
    fields[#fields + 1], fields[#fields + 2] = 'fetched_tokens', fetched
  end
  call('HSET', job, unpack(fields))
end

-- What most chunks need of their job, and `...`, which those of further choices and last ones do: each field costs a tenth
-- of all that is done for a chunk beside reading it. pcall: one key of a wrong type must not break a step half-way through.
local function look(job, next_field, end_field, ...)
  return pcall('HMGET', job, 'state', 'attempt', 'owner', next_field, end_field, 'gateway', 'prefill', 'entry', ...)
end

local function write(job, log, described, data)
  local attempt, choice, start, stop, entry, more = match(described, '^(%d+) (%d+) (%d+) (%d+) (%S*)(.*)$')
  local finish, outcome, cached, fetched = '0', '', '', ''
  if more ~= '' then
    finish, outcome, cached, fetched = match(more, '^ (%d+) (%a*) (%d*) (%d*)$')
  end
  local next_field, end_field = names_of(choice)
  local seen
  if finish == '0' and choice == '0' then
    seen = look(job, next_field, end_field)
  else
    seen = look(job, next_field, end_field, 'choices', 'open')
  end
  if seen.err or seen[2] ~= attempt or seen[3] ~= incarnation then
    return FENCED
  elseif entry ~= '' and seen[8] ~= entry then
    return FENCED
  end
  local at, ended = seen[4] or '0', seen[5]
  if seen[1] ~= 'running' and not ended then
    return FENCED
  end
  local follows, choices = not ended and start == at, seen[9]
  local left = finish ~= '0' and open_choices(job, choices) or nil
  local field, value = damage(choice, choices, next_field, at, end_field, ended, follows, left, seen[10])
  if field then
    return seen[1] == 'running' and {field, value} or FENCED
  elseif choice ~= '0' and tonumber(choice) >= tonumber(choices) then
    return {'0'} -- would end the job before its own choices have ended
  elseif not follows then
    return misplaced(at, start, stop, finish, ended)
  end

  if pcall('XADD', log, '*', 'd', data).err then
    -- A key of another type: the job's log is lost, which its worker finds when it reads what there is of it.
    call('DEL', log)
    return {at}
  end
  if more == '' then
    call('HSET', job, next_field, stop)
  else
    tell(job, next_field, stop, end_field, finish, left, cached, fetched)
  end
  if seen[7] then
    -- With an attempt's first delivery its prompt is computed, which is charged no more.
    refund_prefill(load, seen[7])
    call('HDEL', job, 'prefill')
  end
  publish_later(seen[6], data)
  if left == 1 then
    local charge = call('HGET', job, 'charge')
    end_job(job, log, stream, group, load, seen[8], charge, nil, choices, finish, outcome, retention)
  end
  return WRITTEN
end

local results = {held_count(held)}
if added ~= '' or removed ~= '' then
  change_held('SREM', held, removed)
  change_held('SADD', held, added)
  redis.call('PEXPIRE', held, held_ttl)
  results[1] = redis.call('SCARD', held)
end
for i = 1, (#KEYS - 3) / 2 do
  results[i + 1] = write(KEYS[2 * i + 2], KEYS[2 * i + 3], ARGV[2 * i + 7], ARGV[2 * i + 8])
end
for _, gateway in ipairs(gateways) do
  redis.call('PUBLISH', channels .. gateway, table.concat(by_gateway[gateway]))
end
return results
