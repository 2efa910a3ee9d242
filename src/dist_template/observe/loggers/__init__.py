"""Where metrics go: always into the run's own metrics.jsonl; to TensorBoard and WandB by choice."""
