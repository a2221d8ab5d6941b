"""What a run leaves in its run folder."""

RESULTS = {
    "checkpoint",
    "run-config.toml",
    "flower.log",
    "metrics.jsonl",
    "model.json",
    "model.safetensors",
    "progress.png",
    "statement.json",
    "statement.txt",
}
