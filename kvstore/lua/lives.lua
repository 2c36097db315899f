-- Shared by all scripts, behind common.lua: which lives of workers are over, and what their ends say of their jobs.

-- Who serves a worker's stream: {incarnation = nil when it is dead, draining}; nil when nobody can tell yet.
--
-- A lease may vanish with its worker alive, when the server was restarted: so the last heartbeat must be older than the
-- TTL, and the server itself up for longer, which gives everybody time to come back. (A score of 0 is a worker that said
-- goodbye.)
local function life_of(workers, lease, worker, ttl)
  local holder, state = unpack(redis.call('HMGET', lease, 'incarnation', 'state'))
  if holder then
    return {incarnation = holder, draining = state == 'draining'}
  end
  local beat = tonumber(redis.call('ZSCORE', workers, worker) or '')
  if not beat or now_ms() - beat <= tonumber(ttl) then
    return nil
  end
  local uptime = tonumber(string.match(redis.call('INFO', 'server'), 'uptime_in_seconds:(%d+)'))
  if beat > 0 and uptime * 1000 <= tonumber(ttl) + 1000 then
    return nil
  end
  return {left = beat == 0}
end

-- What a life said at its end: '' is a goodbye, or that it drains, 'broke' that it broke. nil: nothing.
local function last_words(prefix, worker, incarnation)
  local said = redis.pcall('GET', prefix .. 'left:' .. worker .. ':' .. (incarnation or ''))
  return type(said) == 'string' and said or nil
end

-- Why an entry's job, which was meant for `incarnation` or claimed by it, is for others: its worker is dead, or another
-- life of it had read it, or it drains. Of what a draining worker has read that is so until it tells of a token: all that
-- is lost is what is computed of the prompt. That is told second: it may bring such a job to its end. nil: it is in good
-- hands.
local function why_abandoned(life, prefix, worker, incarnation, stream, group, entry, state, began, positions)
  if not life.incarnation then
    local broke = life.left and last_words(prefix, worker, incarnation) == 'broke'
    return broke and 'broke' or life.left and 'left' or 'died', false
  end
  local pending = redis.pcall('XPENDING', stream, group, entry, entry, 1)
  local reader = not pending.err and pending[1] and pending[1][2]
  if reader and reader ~= life.incarnation then
    return 'was restarted', false
  elseif life.draining and not reader then
    return 'is draining', false
  elseif life.draining and (state == 'queued' or tokens_in(positions) <= tokens_of(began)) then
    return 'is draining', true
  end
  return nil
end

-- Tokens of each open choice that a life has to get before its job is no suspect. What kills its worker in the first
-- steps of each life gets a few every time.
local PROVEN = 16

local function is_proven(began, positions)
  local open = 0
  for i = 1, #positions, 2 do
    open = open + (positions[i + 1] and 0 or 1)
  end
  return tokens_in(positions) >= tokens_of(began) + PROVEN * math.max(open, 1)
end

-- What is held against a job, with the worker that has it: how many workers in a row died before it was proven, and how
-- many in a row ran it with not a token from any of them. A worker that said goodbye has not died.
local function rows_of(prefix, worker, state, owner, began, deaths, fruitless, positions)
  local died, ran = tokens_of(deaths), tokens_of(fruitless)
  if state ~= 'running' then
    return died, ran
  elseif is_proven(began, positions) then
    return 0, 0
  end
  ran = tokens_in(positions) > tokens_of(began) and 0 or ran + 1
  if last_words(prefix, worker, owner) == '' then
    return died, ran
  end
  return died + 1, ran
end

-- What was read last of a stream, and how much of what was read has not ended. A stream without a group was never read.
local function read_so_far(stream, group)
  local groups = redis.pcall('XINFO', 'GROUPS', stream)
  for _, told in ipairs(groups.err and {} or groups) do
    local fields = {}
    for i = 1, #told, 2 do
      fields[told[i]] = told[i + 1]
    end
    if fields.name == group then
      return fields['last-delivered-id'], fields.pending
    end
  end
  return '0-0', 0
end
