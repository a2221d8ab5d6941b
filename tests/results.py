"""What a run leaves in its run folder."""

RESULTS = {
    "config.toml",
    "flower.log",
    "metrics.jsonl",
    "model.json",
    "model.safetensors",
    "progress.png",
    "statement.json",
    "statement.txt",
}
