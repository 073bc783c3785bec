"""All that is Horovod's.

A wheel that builds with today's frameworks and survives lost peers: `build`, `resources`, `source`, `proof`. The data
plane on it: `group`, `library`, `rendezvous`, `torch_binding`. What its elastic driver is told: `driver`, `rounds`,
`store`, `notices`.
"""
