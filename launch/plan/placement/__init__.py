"""Which device runs which stage of which replica: DT-FM's scheduler, and one that predicts steps.

`cluster` and `cluster_files` describe the devices, `workload` what a run asks of them. `events`
simulates a pass of it, `step` adds what comes after. `dtfm` is the published cost. The search:
`starts` (structured layouts), `anneal_*` (swaps), `matching` and `paths` (exact), joined by
`solve`. `bounds` says how far from optimal a result can be. `launch/plan/choice/` also chooses
stages, replicas and bits.
"""
