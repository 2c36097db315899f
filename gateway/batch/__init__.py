"""Files of requests that run in the background: what they may hold, and how they are run.

``batches`` is what others call: submit, status, cancel, results. A worker of rq (``kvstore.batch_queue``) calls
``job``, which runs a batch (``run``) through ``gateway.client``, line by line, into a file of results (``journal``).
``lines``, ``bodies``, ``warm``, ``outputs`` and ``verdicts`` are pure.
"""
