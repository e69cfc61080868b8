"""``fully_shard`` on MindSpore cells."""
