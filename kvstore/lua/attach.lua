#!lua flags=allow-oom
-- The part of submit.lua that needs no worker and no memory: find out that the job is there already.
--
-- KEYS 1 job
-- ARGV 1 digest   2 caller (random, one per call of a client)   3 gateway   4 '1': whatever its digest is
-- Returns {'accepted', ...}, {'attached', worker, predicted, fingerprint}, {'taken'} or {'unknown'}.
--
-- Races closed: submit.lua was executed, its reply was lost, and the server was full before the retry: without this the
-- caller would be told "full" about a job that runs. And a job outlives the readiness of its worker, and its log outlives
-- the worker: who attaches must not be told that no worker is there.
return attach(KEYS[1], ARGV[4] ~= '1' and ARGV[1] or nil, ARGV[2], ARGV[3]) or {'unknown'}
