#!lua flags=allow-oom
-- The store of pages: what is in it, how much that is, and what goes first.
--
-- KEYS 1 pages: names by last use (ms), the least recently used first
-- KEYS 2 sizes of pages by name, and under `total` their sum
-- ARGV 1 operation: put, renew or drop
-- ARGV 2 prefix of all names
-- ARGV 3 TTL of a page in ms
-- ARGV 4 budget in bytes for all pages
-- ARGV 5 share of maxmemory that may be in use when pages are put, of a server that evicts nothing by itself
-- ARGV 6... put and renew: name of each page, how long ago (ms) it counts as used, to put also its value. drop: names
--
-- put answers with 1 for each page that is there now and 0 for each that found no room; renew with 1 for each that is
-- there. put without a page only makes room: it drops what is over the budget, too old, or in the way of jobs, and what
-- the server has evicted, and answers with 1 when there is more of that. One call drops 1000 pages at most, some
-- milliseconds of the server's time: a page for which more would have to go finds no room.
--
-- Races closed: several workers put the same page, or one while another drops it. A server may also lose or expire
-- pages, and either of these keys, by itself: a page is there if its own key is, whatever is written here.
local pages, sizes = KEYS[1], KEYS[2]
local operation, prefix, ttl, budget, share = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local now = now_ms()
local drops = 1000

local function key_of(name)
  return prefix .. 'page:' .. name
end

-- 0 also for what is no page, but a key of another type.
local function length_of(name)
  local length = redis.pcall('STRLEN', key_of(name))
  return type(length) == 'number' and length or 0
end

-- Of all of them by the name `total`. What is no size was not written by us: then the page itself is asked.
local function size_of(name)
  local size = redis.call('HGET', sizes, name) or '0'
  return is_count(size) and tonumber(size) or length_of(name)
end

local function drop(name)
  local size = size_of(name)
  redis.call('UNLINK', key_of(name))
  redis.call('ZREM', pages, name)
  if redis.call('HDEL', sizes, name) == 1 and size > 0 then
    redis.call('HINCRBY', sizes, 'total', '-' .. int(size))
  end
end

local function note(name, age, size)
  redis.call('ZADD', pages, int(now - age), name)
  if redis.call('HSETNX', sizes, name, int(size)) == 1 then
    redis.call('HINCRBY', sizes, 'total', int(size))
  end
end

-- Bytes that the server may still take for pages. pcall: a user who may not ask.
local function room_of_server()
  local info = redis.pcall('INFO', 'memory')
  if type(info) ~= 'string' or string.match(info, 'maxmemory_policy:(%S+)') ~= 'noeviction' then
    return math.huge
  end
  local limit = tonumber(string.match(info, '\nmaxmemory:(%d+)')) or 0
  return limit == 0 and math.huge or limit * share - tonumber(string.match(info, 'used_memory:(%d+)'))
end

-- Whether there is room now, and whether there is more to drop.
local function make_room(size)
  local old = redis.call('ZRANGEBYSCORE', pages, '-inf', int(now - ttl), 'LIMIT', 0, 64)
  for _, name in ipairs(old) do
    drop(name)
  end
  drops = drops - #old
  local room = room_of_server()
  local fits = size <= budget and size <= room + size_of('total')
  local wanted = fits and size or 0
  while size_of('total') + wanted > budget or wanted > room do
    local name = redis.call('ZRANGE', pages, 0, 0)[1]
    if not name then
      break
    elseif drops <= 0 then
      return false, true
    end
    room = room + size_of(name)
    drop(name)
    drops = drops - 1
  end
  return fits, #old == 64
end

-- Drops pages that the server has evicted by itself from the accounts. They are found as a server finds what has expired:
-- some at random are looked at, and more while many of them are gone. Whether there may be many more.
local function forget_evicted()
  local looked_at = 64
  local gone
  repeat
    gone = 0
    for _, name in ipairs(redis.call('HRANDFIELD', sizes, looked_at)) do
      if name ~= 'total' and redis.call('EXISTS', key_of(name)) == 0 then
        drop(name)
        gone = gone + 1
      end
    end
    drops = drops - gone
  until gone <= looked_at / 4 or drops <= 0
  return gone > looked_at / 4
end

local function renew(name, age)
  local length = length_of(name)
  if length == 0 then
    drop(name)
    return 0
  end
  redis.call('PEXPIRE', key_of(name), ttl)
  note(name, age, length)
  return 1
end

local function put(name, age, value)
  if renew(name, age) == 1 then
    return 1
  end
  if not make_room(#value) then
    return 0
  end
  redis.call('SET', key_of(name), value, 'PX', ttl)
  note(name, age, #value)
  return 1
end

-- False when one of them was lost, or somebody else wrote to it.
local function accounts_are_sound()
  local by_use, by_name = redis.call('TYPE', pages).ok, redis.call('TYPE', sizes).ok
  if by_use == 'none' or by_name == 'none' then
    return by_use == by_name
  end
  return by_use == 'zset' and by_name == 'hash' and is_count(redis.call('HGET', sizes, 'total') or '0')
end

if not accounts_are_sound() then
  redis.call('DEL', pages, sizes) -- both are begun anew, and the pages expire by themselves
end
local answers = {}
if operation == 'put' then
  for i = 6, #ARGV, 3 do
    answers[#answers + 1] = put(ARGV[i], tonumber(ARGV[i + 1]), ARGV[i + 2])
  end
  if #answers == 0 then
    local many_gone = forget_evicted()
    local _, more = make_room(0)
    answers[1] = (more or many_gone) and 1 or 0
  end
elseif operation == 'renew' then
  for i = 6, #ARGV, 2 do
    answers[#answers + 1] = renew(ARGV[i], tonumber(ARGV[i + 1]))
  end
else
  for i = 6, #ARGV do
    drop(ARGV[i])
  end
end
redis.call('PEXPIRE', pages, ttl)
redis.call('PEXPIRE', sizes, ttl)
return answers
