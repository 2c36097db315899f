#!lua flags=allow-oom
-- How many pages of a prefix are there, from its beginning on.
--
-- KEYS 1 pages
-- ARGV 1 what the pages' names begin with
-- ARGV 2... hashes in order, hex
--
-- Races closed: none; a page that is there now may be gone when it is asked for. allow-oom, as it writes nothing.
for i = 2, #ARGV do
  if redis.call('TYPE', ARGV[1] .. ARGV[i]).ok ~= 'string' then -- not there, or a key of another type
    return i - 2
  end
end
return #ARGV - 1
