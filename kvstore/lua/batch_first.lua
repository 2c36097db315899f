#!lua flags=allow-oom
-- Puts a job first in its queue, as long as it is there.
--
-- KEYS 1 queue of rq: a list
-- ARGV 1 job
--
-- Race closed: another worker takes the job meanwhile, which must not be in the queue a second time.
if redis.call('LREM', KEYS[1], 1, ARGV[1]) == 1 then
  redis.call('LPUSH', KEYS[1], ARGV[1])
end
