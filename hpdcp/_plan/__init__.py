"""Who writes and who reads what: the contracts of planners, writers and readers, and the plans between them.

In come every rank's boxes and names, out come every rank's plan and the metadata of the whole checkpoint.
Face: `planner`, `storage` (contracts), `agreement`; of saves `save_plan`, `local_columns`, `write_results`,
`whole_plan`, `replicas`, `replica_checks`, `replica_rules`, `samples`, `plan_cache`, `plan_key`; of loads `load_plan`,
`shared_boxes`, `read_items`, `read_targets`, `stored_index`, `straight_reads`; and `standard_save_planner`,
`standard_load_planner`.
"""
