#!lua flags=allow-oom
-- Finds how much of a prompt each of several workers holds, and reads what they are charged with.
--
-- KEYS 1 workers (it is not read: it says where all names live)
-- ARGV 1 what all names begin with   2 a JSON list, for each worker: 'worker:incarnation', number of its chain (0: none)
--      then the chains: hashes of the prompt's blocks, packed, 16 bytes each
-- Returns for each worker five numbers: blocks held from the prompt's beginning on; jobs, tokens, prefill and sequences
-- charged.
--
-- What is held is closed under prefix, so that a worker's part of a chain is found by bisection: 10 looks for 512 blocks
-- where asking for each would take 512. Most workers hold nothing of most prompts: one look at the first block tells. Those
-- that do mostly hold as much as another one, or all: so the bisection begins where two others ended.
--
-- The names of all workers' keys are put together here: as KEYS, they would cost the client more than all the rest.
--
-- Race closed: blocks and loads of all workers are of one moment. What a set that is being repaired shows, or one that is
-- not closed for the moment, is less or more than the truth and costs time only: the pool decides what is a hit.
local chains = {}

-- The i-th hash of a chain, cut out once for all workers.
local function hash(chain, i)
  local known = chain[i]
  if not known then
    known = string.sub(chain.packed, 16 * i - 15, 16 * i)
    chain[i] = known
  end
  return known
end

-- Looks at the prompt's first block, at `guess` and at the block behind that, in one call: each costs as much as many
-- looks. How many blocks are held at least, and the first that is known not to be.
local function narrowed(held, chain, guess)
  local lacks = chain.length + 1
  local seen
  if guess < chain.length then
    seen = redis.pcall('SMISMEMBER', held, hash(chain, 1), hash(chain, guess), hash(chain, guess + 1))
  else
    seen = redis.pcall('SMISMEMBER', held, hash(chain, 1), hash(chain, guess))
  end
  if seen.err or seen[1] == 0 then -- an error is a key of another type
    return 0, 1
  elseif seen[2] == 0 then
    return 1, guess
  elseif seen[3] == 0 then
    return guess, guess + 1
  end
  return seen[3] and guess + 1 or guess, lacks
end

local function depth(held, chain)
  if chain.length == 0 then
    return 0
  end
  local has, lacks = narrowed(held, chain, chain.last)
  if lacks - has > 1 and has < chain.earlier and chain.earlier < lacks then
    local least, most = narrowed(held, chain, chain.earlier)
    has, lacks = math.max(has, least), math.min(lacks, most)
  end
  while lacks - has > 1 do
    local middle = math.floor((has + lacks) / 2)
    if redis.call('SISMEMBER', held, hash(chain, middle)) == 1 then
      has = middle
    else
      lacks = middle
    end
  end
  if has > 0 and has ~= chain.last then
    chain.last, chain.earlier = has, chain.last
  end
  return has
end

for i = 3, #ARGV do
  local length = #ARGV[i] / 16
  chains[i - 2] = {packed = ARGV[i], length = length, last = length, earlier = 0}
end
local result, asked = {}, cjson.decode(ARGV[2])
local holding, charged = ARGV[1] .. 'held:', ARGV[1] .. 'load:'
for i = 1, #asked, 2 do
  local life, chain = asked[i], chains[asked[i + 1]]
  local load = redis.pcall('HMGET', charged .. life, 'jobs', 'tokens', 'prefill', 'sequences')
  result[#result + 1] = chain and depth(holding .. life, chain) or 0
  for field = 1, 4 do
    result[#result + 1] = load.err and 0 or tokens_of(load[field])
  end
end
return result
