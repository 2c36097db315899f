#!lua flags=allow-oom
-- Finds how much of a prompt each of several workers holds, and reads what they are charged with.
--
-- KEYS 1 workers (it is not read: it says where all names live)
-- ARGV 1 what all names begin with   2 a JSON list, for each worker: 'worker:incarnation', number of its chain (0: none)
--      then the chains: hashes of the prompt's blocks, joined, 32 bytes each, of which workers' sets have the first 16
-- Returns for each worker five numbers: blocks held from the prompt's beginning on; jobs, tokens, prefill and sequences
-- charged.
--
-- What is held is closed under prefix, so that a worker's part of a chain is found by bisection: 10 looks for 512 blocks
-- where asking for each would take 512. Most workers hold nothing of most prompts, or as much as most others do: one call
-- tells, as the bisection begins with what most workers had so far, then with the last other number.
--
-- The names of all workers' keys are put together here: as KEYS, they would cost the client more than all the rest; and
-- hashes are cut here, as most of them are never looked for.
--
-- Race closed: blocks and loads of all workers are of one moment. What a set that is being repaired shows, or one that is
-- not closed for the moment, is less or more than the truth and costs time only: the pool decides what is a hit.
local call, pcall, sub = redis.call, redis.pcall, string.sub
local chains = {}

-- The i-th hash of a chain, cut out once for all workers.
local function hash(chain, i)
  local known = chain[i]
  if not known then
    known = sub(chain.joined, 32 * i - 31, 32 * i - 16)
    chain[i] = known
  end
  return known
end

-- Looks at the prompt's first block, at `guess` and at the block behind that. How many blocks are held at least, and the
-- first that is known not to be.
local function narrowed(held, chain, guess)
  local seen
  if guess == 0 then
    if pcall('SISMEMBER', held, chain[1]) == 1 then
      return 1, chain.length + 1
    end
    return 0, 1 -- as where the key is of another type
  elseif guess < chain.length then
    seen = pcall('SMISMEMBER', held, chain[1], hash(chain, guess), hash(chain, guess + 1))
  else
    seen = pcall('SMISMEMBER', held, chain[1], hash(chain, guess))
  end
  if seen.err or seen[1] == 0 then -- an error is a key of another type
    return 0, 1
  elseif seen[2] == 0 then
    return 1, guess
  elseif seen[3] == 0 then
    return guess, guess + 1
  end
  return seen[3] and guess + 1 or guess, chain.length + 1
end

local function depth(held, chain)
  local has, lacks = narrowed(held, chain, chain.guess)
  if lacks - has > 1 and has < chain.other and chain.other < lacks then
    local least, most = narrowed(held, chain, chain.other)
    has, lacks = math.max(has, least), math.min(lacks, most)
  end
  while lacks - has > 1 do
    local middle = math.floor((has + lacks) / 2)
    if call('SISMEMBER', held, hash(chain, middle)) == 1 then
      has = middle
    else
      lacks = middle
    end
  end
  local times = (chain.times[has] or 0) + 1
  chain.times[has] = times
  if has ~= chain.guess then
    chain.other = has
    if times > (chain.times[chain.guess] or 0) then
      chain.guess, chain.other = has, chain.guess
    end
  end
  return has
end

for i = 3, #ARGV do
  local length = #ARGV[i] / 32
  chains[i - 2] = {joined = ARGV[i], length = length, guess = length, other = 0, times = {}}
  if length > 0 then
    hash(chains[i - 2], 1)
  else
    chains[i - 2] = false
  end
end
local result, asked = {}, cjson.decode(ARGV[2])
local holding, charged = ARGV[1] .. 'held:', ARGV[1] .. 'load:'
local last = 0
for i = 1, #asked, 2 do
  local life, chain = asked[i], chains[asked[i + 1]]
  result[last + 1] = chain and depth(holding .. life, chain) or 0
  local load = pcall('HMGET', charged .. life, 'jobs', 'tokens', 'prefill', 'sequences')
  for field = 1, 4 do
    -- What is no number of tokens counts as none, as in tokens_of: nothing of a key of another type is.
    local charge = load[field] and tonumber(load[field])
    result[last + 1 + field] = charge and charge > 0 and charge < 1e15 and charge - charge % 1 or 0
  end
  last = last + 5
end
return result
