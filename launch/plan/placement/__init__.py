"""Which device runs which stage of which replica.

`cluster` and `cluster_files` describe the devices, `workload` what a run asks of them. `events`
simulates a pass of it, `step` adds what comes after. The search: `starts` (structured layouts) and
`anneal_step` (swaps), joined by `solve`. `step_bound` of `step` says how far from optimal a result
can be.
`launch/plan/choice/` also chooses stages, replicas and bits.
"""
