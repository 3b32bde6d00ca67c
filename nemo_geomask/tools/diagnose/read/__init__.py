"""Files of a run, read into one table: records, NeMo-RL's logs, logged metrics."""
