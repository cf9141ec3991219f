"""`sacctmgr` with Slurm's grammar: words -> command (grammar) -> transaction (actions) -> text (output)."""
