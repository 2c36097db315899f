#!lua flags=allow-oom
-- The part of submit.lua that a full server must still do: find out that the job is there already.
--
-- KEYS 1 job
-- ARGV 1 digest   2 submission   3 gateway
-- Returns {'accepted'}, {'attached'}, {'taken'} or {'unknown'}.
--
-- Race closed: submit.lua was executed, its reply was lost, and the server was full before the retry. Without this the
-- caller would be told "full" about a job that runs.
return attach(KEYS[1], ARGV[1], ARGV[2], ARGV[3]) or {'unknown'}
