#!lua flags=allow-oom
-- Writes a worker's held blocks anew, in several calls: into a set beside the old one, which it replaces in the end.
--
-- KEYS 1 replacement   2 held blocks
-- ARGV 1 hashes, packed; '' for the last call   2 TTL in ms
-- Returns the number of blocks in the replacement; after the last call, in the held blocks.
--
-- Races closed: nobody sees a part of the new set; what a process left half done expires; the last call, repeated after a
-- lost reply, finds no replacement and changes nothing; two that replace the same set write beside each other, and the
-- later one's stays.
if ARGV[1] == '' then
  if redis.call('EXISTS', KEYS[1]) == 1 then
    redis.call('RENAME', KEYS[1], KEYS[2])
    redis.call('PEXPIRE', KEYS[2], ARGV[2])
  end
  return held_count(KEYS[2])
end
change_held('SADD', KEYS[1], ARGV[1])
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return held_count(KEYS[1])
