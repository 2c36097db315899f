#!lua flags=allow-oom
-- Moves one job that its worker has not read yet to another worker, if it has its first token sooner there.
--
-- KEYS 1 victim's lease   2 its stream   3 thief's lease   4 its stream   5 load of the thief's incarnation
-- ARGV 1 group   2 what all names begin with   3 victim   4 thief   5 thief's incarnation
--      6 seconds in which the thief computes a prompt token    7 seconds in which a place at the victim becomes free
--      8 seconds by which the job must be sooner there         9 entries to look at
--      then entries of which the thief holds something, each with how many tokens, from the beginning on
-- Returns 1 moved, 0 nothing worth moving, -1 when these two cannot trade: one of them has no lease, the thief is replaced
-- or draining, or their pages would not be the same bits.
--
-- Of the first unread entries it takes the first that is worth it. At the victim it waits for the prompts charged before
-- it and for a place, then what isn't cached of its tokens is computed; at the thief, for whatever has come there
-- meanwhile, then what the thief does not hold of them is. So it is charged there, and so it is predicted to be found.
-- A job that workers have died of stays where rehome.lua put it: the thief may have another one.
--
-- Races closed: an entry after the group's last delivered one has never left the server, so the victim never learns of a
-- job that is taken, whatever it is reading meanwhile; of several thieves one gets it; a job that was cancelled or submitted
-- anew under its id is left alone; load and leases are judged in the moment of the move, not when the thief looked; its
-- charges are at one worker at any time; a thief that was replaced gets nothing. Not closed: each repetition after a lost
-- reply may move one job more, but only one that starts sooner behind those that were moved before.
-- Jobs and the victim's loads are named by entries and jobs; they share the hash tag, hence the slot.
local victim_lease, victim_stream, thief_lease, thief_stream, thief_load = unpack(KEYS, 1, 5)
local group, prefix, victim, thief, incarnation = unpack(ARGV, 1, 5)
local own_s, place_s, margin_s = tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[8])

-- A load's sequences and prefill; none of what is no load.
local function charged_to(load)
  local seen = redis.pcall('HMGET', load, 'sequences', 'prefill')
  return seen.err and 0 or tokens_of(seen[1]), seen.err and 0 or tokens_of(seen[2])
end

local function number(text)
  return tonumber(text or '') or 0
end

local theirs = redis.call('HMGET', victim_lease, 'incarnation', 'fingerprint', 'model', 'prefill_tok_s', 'max_running')
local ours = redis.call('HMGET', thief_lease, 'incarnation', 'fingerprint', 'model', 'state', 'context_length',
  'max_running')
if not theirs[1] or ours[1] ~= incarnation or ours[4] ~= 'ready' or theirs[2] ~= ours[2] or theirs[3] ~= ours[3] then
  return -1
end

local held_of = {}
for i = 10, #ARGV, 2 do
  held_of[ARGV[i]] = tokens_of(ARGV[i + 1])
end

-- Of a job's tokens, what the thief has cached and what it would compute. They are the prompt, and what a job has said
-- that goes on after its worker was lost: all that is computed or predicted where it is. The last one is always computed.
local function share(job, predicted)
  local tokens = math.max(job.prompt, job.prefill + predicted)
  job.held = math.max(0, math.min(held_of[job.entry] or 0, tokens - 1))
  job.own = tokens - job.held
end

-- The first unread jobs, and the prefill and the sequences that all unread ones are charged with: those not looked at are
-- taken to be like the others.
local function unread(last, count)
  local found, prefill, sequences = {}, 0, 0
  local entries = redis.pcall('XRANGE', victim_stream, '(' .. last, '+', 'COUNT', ARGV[9])
  for _, entry in ipairs(entries.err and {} or entries) do
    local job = prefix .. 'job:' .. (entry[2][2] or '')
    local seen = redis.pcall('HMGET', job, 'state', 'worker', 'entry', 'worker_incarnation', 'charge', 'prefill',
      'prompt_tokens', 'choices', 'predicted', 'deaths')
    if not seen.err and seen[1] == 'queued' and seen[2] == victim and seen[3] == entry[1] then
      found[#found + 1] = {job = job, request = entry[2][2], entry = entry[1], life = seen[4] or '', charge = seen[5],
        prefill = tokens_of(seen[6]), prompt = tokens_of(seen[7]), choices = sequences_of(seen[8]),
        suspect = tokens_of(seen[10]) > 0}
      share(found[#found], tokens_of(seen[9]))
      prefill = prefill + found[#found].prefill
      sequences = sequences + found[#found].choices
    end
  end
  local more = math.max(1, count / math.max(1, #found))
  return found, prefill * more, sequences * more
end

local function fits(job)
  local context = number(ours[5])
  return context == 0 or job.prompt + (tokens_of(job.charge) - job.prompt) / job.choices <= context
end

local function move(job)
  local entry = redis.pcall('XADD', thief_stream, '*', 'request', job.request)
  if entry.err then
    return -1 -- a key of another type
  end
  redis.call('HSET', job.job, 'worker', thief, 'worker_incarnation', incarnation, 'entry', entry, 'prefill',
    int(job.own), 'predicted', int(job.held), 'stolen_from', victim)
  drop_entry(victim_stream, group, job.entry)
  refund(prefix .. 'load:' .. victim .. ':' .. job.life, job.charge, job.prefill, job.choices)
  charge_to(thief_load, job.charge, job.own, job.choices)
  return 1
end

-- Places that so many sequences lack.
local function lacking(sequences, max_running)
  return math.max(0, sequences - math.max(number(max_running), 1))
end

local last, pending = read_so_far(victim_stream, group)
local length = redis.pcall('XLEN', victim_stream)
local count = type(length) == 'table' and 0 or length - pending
local jobs, prefill, sequences = unread(last, count)
if #jobs == 0 then
  return 0
end
local rate = number(theirs[4])
local their_s = rate > 0 and 1 / rate or own_s
local their_sequences, their_prefill = charged_to(prefix .. 'load:' .. victim .. ':' .. theirs[1])
local own_sequences, own_prefill = charged_to(thief_load)
local before = math.max(0, their_prefill - prefill)
local ahead = math.max(0, their_sequences - sequences)
for _, job in ipairs(jobs) do
  ahead = ahead + job.choices
  local there = (before + job.prefill) * their_s + lacking(ahead, theirs[5]) * place_s
  -- A place takes as long here: it is the same model, and so are the answers.
  local here = (own_prefill + job.own) * own_s + lacking(own_sequences + job.choices, ours[6]) * place_s
  if not job.suspect and fits(job) and here + margin_s < there then
    return move(job)
  end
  before = before + job.prefill
end
return 0
