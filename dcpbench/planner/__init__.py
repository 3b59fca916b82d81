"""`dcpbench plan`: what schedulers would do with a workload, without launching anything, and how it is shown."""
