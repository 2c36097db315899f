"""OpenAI's HTTP API, in the gateway's own process and event loop.

Each HTTP request becomes one GenerateRequest for each of its prompts, and goes the way of any gRPC call from there on:
the same bounds, routing, metrics, resumption and errors (``gateway.rpc.guarded``). Here is only what differs: JSON in,
JSON or server-sent events out.
"""
